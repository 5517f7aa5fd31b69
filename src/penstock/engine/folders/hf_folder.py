"""A pretrained model: a Hugging Face folder opened, checked, and given to an engine as units."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch.distributed as dist

from penstock.data.tokenizer import ByteTokenizer
from penstock.engine.checkpoint.load import newest_intact
from penstock.engine.checkpoint.manifest import CheckpointInfo, DamagedCheckpoint
from penstock.engine.folders.runs import CHECKPOINT_FOLDER, RUN_FILE, read_run
from penstock.engine.options import EngineOptions
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.config_json import CONFIG_FILE as HUGGING_FACE_CONFIG
from penstock.model.hf.config_json import NotNative, config_from_json, config_to_json, read_config_json
from penstock.model.hf.families import names_of
from penstock.model.hf.files import MissingFile, Names, WeightFiles, is_quantized, slices_of, units_from_files
from penstock.parallel.grid import wait_for_all
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.tensor_slice import Shape, StoredSlice
from penstock.settings import ConfigError, Layout, ModelConfig, Native, Precision, RunConfig, checked

_PRECISIONS = {"F64": Precision.FP64, "F32": Precision.FP32, "BF16": Precision.BF16, "F16": Precision.FP16}

T = TypeVar("T")

Rates = Literal["texts", "tokens"]
"""What a classifier as a model's head rates."""


@dataclass(frozen=True)
class HuggingFaceForm:
    """The form of a model in transformers: its names there, its config.json, and the folder it came from.

    `describe` makes the config.json, and raises ValueError where no family of transformers is the model. `folder` is
    where tokenizer files are copied from; None where the model was made here. `bytes_end`: whether a model of bytes
    has an end token; None for other models. `own_name` gives a parameter's name in transformers' model where older
    files call it otherwise.
    """

    names: Names
    describe: Callable[[], Mapping[str, Any]]
    folder: Path | None = None
    bytes_end: bool | None = None
    own_name: Callable[[str], str] | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> HuggingFaceForm:
        """The form of a decoder that was made here."""
        return cls(names_of(config), lambda: config_to_json(config))


class EngineArguments(NamedTuple):
    """The arguments with which an `Engine` runs a model that settings or a folder describe."""

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    layout: Layout
    options: EngineOptions
    form: HuggingFaceForm | None


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder, checked: its units take their values from there.

    `units` makes them for the groups that share them; nothing is read before a unit is initialised. `precision` is that
    of most of the values in the files. `is_quantized`: its weights are 8-bit numbers there.
    """

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    form: HuggingFaceForm
    precision: Precision
    config: ModelConfig
    is_quantized: bool = False

    def arguments(self, layout: Layout | None, options: EngineOptions | None) -> EngineArguments:
        """An engine's arguments for the model; its options have the files' precision unless they are given."""
        options = options or EngineOptions(precision=self.precision)
        return EngineArguments(self.units, self.hidden_size, layout or Layout(), options, self.form)


@dataclass(frozen=True)
class StoredModel:
    """A model in files: its units, its names there, the files' headers, and how it is written for transformers.

    `shape` is the decoder's, or says of transformers' layers what settings say of both. `step` is that of the
    checkpoint that the files are; None where they are a Hugging Face folder's.
    """

    shape: ModelConfig
    units: tuple[UnitSpec, ...]
    names: Names
    files: WeightFiles
    form: HuggingFaceForm
    step: int | None = None

    @property
    def precision(self) -> Precision:
        """That of most of the values in the files; fp32 where that is none of an engine's."""
        num_values: Counter[str] = Counter()
        for unit in self.units:
            for own in (own for _, _, slices in slices_of(unit, self.names) for own in slices):
                if stored := self.files.tensors.get(own.name):
                    num_values[stored.dtype] += prod(stored.shape)
        return _PRECISIONS.get(max(num_values, key=num_values.__getitem__, default=""), Precision.FP32)


@checked
def open_pretrained(
    path: Path | str, native: Native = True, shape: ModelConfig | None = None, quiet: bool = False
) -> Pretrained:
    """Open a Hugging Face folder, or that of a run; every process that will hold a part of it calls this alike.

    `native`: by the decoder, or else by transformers' own layers.

    Configuration, names, shapes and the files' sizes are checked against each other; no value is read. `shape`: that
    of the units, which may differ from the model's own in what only training uses. `quiet`: somebody has already warned
    of the run's damaged checkpoints.

    Raises:
        MissingFile: a FileNotFoundError with the path of what is missing; on every process if on one.
        ValueError: an architecture or a setting that cannot be run so, damaged files, missing tensors, wrong shapes,
            or pickles; on every process if on one.
    """
    return _on_every_process(lambda: _open(Path(path), native, shape, quiet))


def rates_of(form: HuggingFaceForm) -> Rates | None:
    """The kind of rating of a reward model or another classifier; None for a model that gives tokens."""
    name = _architecture(form)
    return "texts" if name.endswith("SequenceClassification") else "tokens" if name.endswith("Classification") else None


def is_reward_model(content: Mapping[str, Any]) -> bool:
    """True for the config.json of a model that gives each text one number."""
    name = str((content.get("architectures") or [""])[0])
    # As transformers, which has two labels where nothing is said.
    num_labels = len(content.get("id2label") or (0, 1))
    return name.endswith("SequenceClassification") and content.get("num_labels", num_labels) == 1


def reward_model_of(config: RunConfig) -> Mapping[str, Any] | None:
    """The config.json of the reward model that a run begins with; None where it begins with none."""
    source = config.model.pretrained
    if source is None or config.model.native is not False:
        return None
    content = read_config_json(_described_at(Path(source)))
    return content if is_reward_model(content) else None


def refuse_classifier(form: HuggingFaceForm) -> None:
    """Refuse a model whose head gives no tokens, such as a reward model. Raises: ValueError."""
    if rates_of(form) is not None:
        raise ValueError(
            f"{_architecture(form)} rates texts and gives no tokens; penstock score writes its ratings, and "
            "Engine.from_hf(..., native=False) runs it with a loss of your own"
        )


def refuse_several_labels(form: HuggingFaceForm) -> None:
    """Refuse to train a model that gives each text several numbers. Raises: ValueError."""
    if rates_of(form) == "texts" and not is_reward_model(form.describe()):
        raise ValueError(
            f"{_architecture(form)} rates texts by several labels, but penstock train takes a reward model, of one "
            "label; transformers' from_pretrained(..., num_labels=1) makes one, and Engine.from_hf(..., native=False) "
            "runs this one with a loss of your own"
        )


def _architecture(form: HuggingFaceForm) -> str:
    return str((form.describe().get("architectures") or [""])[0])


def holds_adapters(folder: Path) -> bool:
    """True for the folder of a run that trains adapters."""
    return (folder / RUN_FILE).is_file() and read_run(folder).adapter.is_used


def refuse_adapters(folder: Path) -> None:
    """Refuse a run that trains adapters, where a model is to begin without them. Raises: ValueError."""
    if holds_adapters(folder):
        raise ValueError(
            f"{folder} has adapters, which another model cannot begin with; write both as one by penstock convert "
            f"--merge-adapters, or give the base model and adapter.pretrained = {str(folder / 'adapter-N')!r}"
        )


def pretrained_tokenizer(folder: Path | str, vocab_size: int) -> str:
    """The name of the tokenizer of the model in a folder. Raises: ValueError if it is not known."""
    folder = Path(folder)
    if (folder / RUN_FILE).is_file():
        return read_run(folder).data.tokenizer or "bytes"
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer.model").is_file():
        return str(folder.resolve())
    if vocab_size > ByteTokenizer(end_token=True).vocab_size:
        raise ValueError(f"it has a vocabulary of {vocab_size} tokens and no tokenizer.json; give data.tokenizer")
    return "bytes"


def reason_for_transformers(folder: Path | str, native: Native) -> str | None:
    """The reason why transformers' own layers run the model in a folder; None where the decoder does.

    Raises: as `open_pretrained`, for what it has read.
    """
    folder = Path(folder)
    if (folder / RUN_FILE).is_file():
        return "it was trained so" if read_run(folder).model.native is False else None
    if native != "auto":
        return None if native else "native = false asks for them"
    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder} to read a model from")
    try:
        config_from_json(read_config_json(folder))
    except NotNative as error:
        return str(error).rpartition("; ")[0]
    return None


def check_quantizable(folder: Path, shape: ModelConfig) -> None:
    """Refuse to quantize models whose weights stay as they are. Raises: ConfigError that says which can be."""
    kind = "is run by transformers' own layers" if shape.native is False else "is a mixture of experts"
    if shape.native is False or shape.experts.num_experts:
        raise ConfigError(
            f"{folder} cannot be quantized, since it {kind}; only dense models of Penstock's own layers can, so leave "
            "quantize out; precision = bf16 takes half the bytes of fp32"
        )


def find_model(folder: Path, native: Native = "auto", quiet: bool = False) -> StoredModel:
    """The model in a Hugging Face folder, or the newest intact one of a run.

    Damaged checkpoints are warned of unless `quiet`. Raises: as `open_pretrained`.
    """
    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder} to read a model from")
    is_run = (folder / RUN_FILE).is_file()
    if reason_for_transformers(folder, native) is not None:
        return _model_of_transformers(folder, is_run, quiet)
    if is_run:
        return _decoder_of_run(folder, quiet)
    content = read_config_json(folder)
    try:
        is_quantized(content)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    shape = config_from_json(content)
    names = names_of(shape)
    form = HuggingFaceForm(names, lambda: content, folder)
    return StoredModel(shape, decoder_units(shape), names, WeightFiles.open(folder), form)


def _decoder_of_run(folder: Path, quiet: bool) -> StoredModel:
    config, info = read_run(folder), newest_checkpoint(folder, quiet)
    names = CheckpointNames.of(info)
    shape = config.model.whole(names.vocab_size)
    form = HuggingFaceForm.of(shape)
    source = Path(config.model.pretrained or "")
    if (source / HUGGING_FACE_CONFIG).is_file():
        # Its other settings, such as end tokens, still hold.
        form = replace(form, describe=lambda: read_config_json(source), folder=source)
    elif (name := config.data.tokenizer or "bytes") == "bytes":
        form = replace(form, bytes_end=bool(config.data.end_token))
    elif (tokenizer := Path(name)).exists():
        form = replace(form, folder=tokenizer if tokenizer.is_dir() else tokenizer.parent)
    files = WeightFiles.of_files(info.path, info.files)
    return StoredModel(shape, decoder_units(shape), names, files, form, info.step)


def _described_at(folder: Path) -> Path:
    """The folder of the model's config.json: a run has the values alone, and names what it began with."""
    while (folder / RUN_FILE).is_file():
        folder = Path(read_run(folder).model.pretrained or "")
    return folder


def _model_of_transformers(folder: Path, is_run: bool, quiet: bool) -> StoredModel:
    # Only now, since it loads transformers.
    from penstock.model.transformers.model import TransformersModel

    source = _described_at(folder)
    content, files = read_config_json(source), WeightFiles.open(source)
    model = TransformersModel.open(files)
    form = HuggingFaceForm(model.names, lambda: content, source, own_name=model.names.own_name)
    if not is_run:
        return StoredModel(model.shape, model.units(), model.names, files, form)
    info = newest_checkpoint(folder, quiet)
    files = WeightFiles.of_files(info.path, info.files)
    return StoredModel(model.shape, model.units(), CheckpointNames.of(info), files, form, info.step)


def newest_checkpoint(folder: Path, quiet: bool = False) -> CheckpointInfo:
    """A run's newest intact checkpoint; those passed over are warned of, by one process, unless `quiet`.

    Raises: ValueError where there is none.
    """
    quiet = quiet or (dist.is_initialized() and dist.get_rank() > 0)
    identity = json.loads(json.dumps(read_run(folder).identity()))
    try:
        return newest_intact(folder / CHECKPOINT_FOLDER, identity, quiet)
    except DamagedCheckpoint as error:
        raise ValueError(str(error)) from None


@dataclass(frozen=True)
class CheckpointNames:
    """A model's parameters in a run's checkpoint: whole, or in the slices that ranks had."""

    stored: Mapping[str, tuple[StoredSlice, ...]]
    path: Path

    @classmethod
    def of(cls, info: CheckpointInfo) -> CheckpointNames:
        return cls(info.stored, info.path)

    @property
    def vocab_size(self) -> int:
        """The number of rows of a decoder's embedding. Raises: ValueError if the checkpoint has none."""
        embedding = self.stored.get("embedding.weight")
        if embedding is None or len(embedding[0].part.full_shape) != 2:
            raise ValueError(f"checkpoint {self.path} holds no embedding.weight of tokens and sizes")
        return embedding[0].part.full_shape[0]

    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]:
        """The stored tensors that make up the parameter; none for one that only training uses and this run did not."""
        only_in_training = ".balance." in full_name or ".predictions." in full_name
        under_adapter = ".base_layer.".join(full_name.rsplit(".", 1))
        missing = () if only_in_training else (StoredSlice.at(full_name, shape),)
        stored = self.stored.get(full_name) or self.stored.get(under_adapter) or missing
        # A whole tensor must have the shape of the parameter, which is checked against the file.
        return tuple(StoredSlice.at(found.name, shape) if found.part.is_whole else found for found in stored)

    def is_surplus(self, stored: str) -> bool:
        """True for stored tensors that are rightly left unread, such as optimizer state."""
        return True


def _open(folder: Path, native: Native, shape: ModelConfig | None, quiet: bool) -> Pretrained:
    refuse_adapters(folder)
    found = find_model(folder, native, quiet)
    if found.shape.native is False:
        placed = units_from_files(found.units, found.names, found.files)
        units = partial(_unshared, placed)
    else:
        wanted = shape or found.shape

        def units(groups: ModelGroups) -> Sequence[UnitSpec]:
            return units_from_files(decoder_units(wanted, groups=groups), found.names, found.files)

        units(ModelGroups())
        # A run's names are not those that transformers reads.
        found = replace(found, shape=wanted, form=replace(found.form, names=names_of(wanted)))
    own = found.form.describe() if found.form.folder == folder else {}
    return Pretrained(
        *(units, found.shape.hidden_size, found.form, found.precision, found.shape), is_quantized=is_quantized(own)
    )


def _unshared(units: Sequence[UnitSpec], groups: ModelGroups) -> Sequence[UnitSpec]:
    for axis, size in {"tp": groups.tp_size, "cp": groups.cp_size, "ep": groups.ep_size}.items():
        if size > 1:
            raise ValueError(f"transformers' own layers cannot be shared over {axis} = {size}; native layers can")
    return units


def _on_every_process(act: Callable[[], T]) -> T:
    """Act together with all processes, before an engine has its groups; the group made here is destroyed again."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return act()
    wait_for_all()
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    try:
        return on_all_ranks(act, partial(gather_json, group=group), MissingFile, ValueError)
    finally:
        dist.destroy_process_group(group)

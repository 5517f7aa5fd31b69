"""A pretrained model: a Hugging Face folder opened, checked, and given to an engine as units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.data.tokenizer import ByteTokenizer
from penstock.engine.checkpoint.manifest import CheckpointInfo, DamagedCheckpoint, check_files, published, read_manifest
from penstock.engine.runs import CHECKPOINT_FOLDER, CONFIG_FILE
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.config_json import CONFIG_FILE as HUGGING_FACE_CONFIG
from penstock.model.hf.config_json import config_from_json, config_to_json, read_config_json
from penstock.model.hf.families import names_of
from penstock.model.hf.files import MissingFile, Names, WeightFiles, units_from_files
from penstock.parallel.grid import wait_for_all
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.tensor_slice import Shape, StoredSlice
from penstock.settings import ModelConfig, checked, read_config

T = TypeVar("T")


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


@dataclass(frozen=True)
class Pretrained:
    """A model in a folder, checked: its units take their values from there.

    `units` makes them for the groups that share them; nothing is read before a unit is initialised.
    """

    units: Callable[[ModelGroups], Sequence[UnitSpec]]
    hidden_size: int
    form: HuggingFaceForm
    config: ModelConfig | None = None


@dataclass(frozen=True)
class StoredDecoder:
    """A decoder in files: its shape, its names there, the files' headers, and how it is written for transformers."""

    shape: ModelConfig
    names: Names
    files: WeightFiles
    form: HuggingFaceForm


@checked
def open_pretrained(path: Path | str, native: bool = True, shape: ModelConfig | None = None) -> Pretrained:
    """Open a Hugging Face folder, or that of a run; every process that will hold a part of it calls this alike.

    Configuration, names, shapes and the files' sizes are checked against each other; no value is read. `shape`: that
    of the units, which may differ from the model's own in what only training uses.

    Raises:
        MissingFile: a FileNotFoundError with the path of what is missing; on every process if on one.
        ValueError: an architecture or a setting that cannot be run so, damaged files, missing tensors, wrong shapes,
            or pickles; on every process if on one.
    """
    return _on_every_process(lambda: _open(Path(path), native, shape))


def pretrained_shape(path: Path | str) -> ModelConfig:
    """The shape of the decoder in a folder. Raises: as `open_pretrained`, for what it has read."""
    return find_decoder(Path(path)).shape


def pretrained_tokenizer(folder: Path | str, vocab_size: int) -> str:
    """The name of the tokenizer of the model in a folder. Raises: ValueError if it is not known."""
    folder = Path(folder)
    if (folder / CONFIG_FILE).is_file():
        return read_config(folder / CONFIG_FILE).data.tokenizer or "bytes"
    if (folder / "tokenizer.json").is_file():
        return str(folder.resolve())
    if vocab_size > ByteTokenizer(end_token=True).vocab_size:
        raise ValueError(f"it has a vocabulary of {vocab_size} tokens and no tokenizer.json; give data.tokenizer")
    return "bytes"


def find_decoder(folder: Path) -> StoredDecoder:
    """The decoder in a Hugging Face folder, or the newest intact one of a run. Raises: as `open_pretrained`."""
    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder} to read a model from")
    if (folder / CONFIG_FILE).is_file():
        return _decoder_of_run(folder)
    content = read_config_json(folder)
    shape = config_from_json(content)
    names = names_of(shape)
    return StoredDecoder(shape, names, WeightFiles.open(folder), HuggingFaceForm(names, lambda: content, folder))


def _decoder_of_run(folder: Path) -> StoredDecoder:
    config, info = read_config(folder / CONFIG_FILE), _newest_checkpoint(folder)
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
    return StoredDecoder(shape, names, WeightFiles.of_files(info.path, info.files), form)


def _newest_checkpoint(folder: Path) -> CheckpointInfo:
    refused = ""
    for path in reversed(published(folder / CHECKPOINT_FOLDER)):
        try:
            info = read_manifest(path)
            check_files(info)
            return info
        except DamagedCheckpoint as error:
            refused = refused or f"; {path.name} is damaged: {error}"
    raise ValueError(f"{folder} holds no intact checkpoint{refused}")


@dataclass(frozen=True)
class CheckpointNames:
    """A decoder's parameters in a run's checkpoint: whole, or in the slices that ranks had."""

    stored: Mapping[str, tuple[StoredSlice, ...]]
    vocab_size: int

    @classmethod
    def of(cls, info: CheckpointInfo) -> CheckpointNames:
        stored = info.stored
        embedding = stored.get("embedding.weight")
        if embedding is None or len(embedding[0].part.full_shape) != 2:
            raise ValueError(f"checkpoint {info.path} holds no embedding.weight of tokens and sizes")
        return cls(stored, embedding[0].part.full_shape[0])

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


def _open(folder: Path, native: bool, shape: ModelConfig | None) -> Pretrained:
    if not native:
        return _open_adapted(folder)
    found = find_decoder(folder)
    shape = shape or found.shape

    def units(groups: ModelGroups) -> Sequence[UnitSpec]:
        return units_from_files(decoder_units(shape, groups=groups), found.names, found.files)

    units(ModelGroups())
    # A run's names are not those that transformers reads.
    return Pretrained(units, shape.hidden_size, replace(found.form, names=names_of(shape)), shape)


def _open_adapted(folder: Path) -> Pretrained:
    # Only now, since it loads transformers.
    from penstock.model.adapters.transformers.model import TransformersModel

    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder} to read a model from")
    content, files = read_config_json(folder), WeightFiles.open(folder)
    model = TransformersModel.open(files)
    placed = units_from_files(model.units(), model.names, files)

    def units(groups: ModelGroups) -> Sequence[UnitSpec]:
        for axis, size in {"tp": groups.tp_size, "cp": groups.cp_size, "ep": groups.ep_size}.items():
            if size > 1:
                raise ValueError(f"transformers' own layers cannot be shared over {axis} = {size}; native layers can")
        return placed

    return Pretrained(
        units, model.hidden_size, HuggingFaceForm(model.names, lambda: content, folder, own_name=model.names.own_name)
    )


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

"""A model's folder rewritten in the other form, a run's or Hugging Face's, by one process."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from penstock.data.tokenizer import ByteTokenizer, save_byte_tokenizer
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.folders.lora import merged_weight, save_adapter, with_adapter
from penstock.engine.folders.model_folder import ModelFolder, open_folder
from penstock.engine.folders.run_check import with_pretrained
from penstock.engine.folders.run_parts import engine_arguments
from penstock.engine.folders.runs import (
    CHECKPOINT_FOLDER,
    MODEL_FOLDER,
    RUN_FILE,
    TOKENIZER_FILES,
    RunLock,
)
from penstock.engine.model_state import ModelState
from penstock.engine.pipeline import Pipeline
from penstock.engine.training.trainer import Trainer
from penstock.io.files import naming, refuse_used
from penstock.model.cpu.quantized import rounded
from penstock.model.hf.families import CONFIG_FILE, HuggingFaceForm
from penstock.model.hf.files import (
    DTYPES,
    INDEX_FILE,
    INT8,
    KEY,
    SINGLE_FILE,
    WeightFiles,
    description,
    scale_name,
    slices_of,
    units_from_files,
)
from penstock.model.linear import joint_weights
from penstock.parallel.collectives import gather_uneven
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.tensor_slice import Shape, Shard, StoredSlice, TensorSlice, copies
from penstock.settings import DataConfig, ModelConfig, ParallelConfig, Precision, RunConfig, TrainConfig
from penstock.settings.declare import checked

# ---- A model written as a Hugging Face folder that transformers loads: whole, or not at all


MAX_SHARD_BYTES = 5 * 10**9
ADAPTER_FOLDER = "adapter"
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

_logger = logging.getLogger(__name__)

"""A function that is called after each file with its number of bytes."""


@checked
@dataclass(frozen=True)
class ExportOptions:
    """Options of a written model.

    dtype: "fp32", "fp64", "bf16" or "fp16"; None keeps what the parameters have. max_shard_bytes: of one file; a
    tensor that is larger has a file of its own. merge_adapters: add LoRA adapters to the weights; otherwise the base
    weights are written as they are, and the adapters into the folder `adapter` inside. quantize: keep weights of
    products as 8-bit numbers.

    Raises: ValueError for another dtype, or files of no size.
    """

    dtype: str | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES
    merge_adapters: bool = False
    quantize: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={self.max_shard_bytes}: a file holds at least a byte")

    def rounds(self, parameter: ExportedParameter) -> bool:
        """True for parameters that become 8-bit numbers."""
        return self.quantize and parameter.is_product

    def num_bytes(self, parameter: ExportedParameter) -> int:
        """Bytes of a parameter's values."""
        itemsize = 1 if self.rounds(parameter) else self.torch_dtype(parameter.dtype).itemsize
        return math.prod(parameter.shape) * itemsize

    def torch_dtype(self, own: torch.dtype) -> torch.dtype:
        return own if self.dtype is None else _DTYPES[self.dtype]


@dataclass(frozen=True)
class ExportedParameter:
    """One parameter of a model to be written."""

    full_name: str
    shape: Shape
    dtype: torch.dtype
    #: returns all of its values, on any device; called once, in turn, on all ranks that share it
    fetch: Callable[[], Tensor]
    #: False if this rank does not write it, and only helps another to fetch it
    is_ours: bool = True
    #: True for weights of products, which can be kept as 8-bit numbers
    is_product: bool = False


def export_model(
    state: ModelState,
    form: HuggingFaceForm | None,
    path: Path | str,
    options: ExportOptions,
) -> None:
    """Write a model in this form as a new folder; all ranks call this at the same point.

    Raises:
        ValueError: the model has no form that transformers knows, or the folder holds something; on all ranks alike.
        DifferentCalls, TransportError: not all ranks have called it.
    """
    state.check_call("save_hf", path=(path, Path | str))
    if form is None:
        raise ValueError("this engine's model was given as layers, for which transformers has no config.json")
    state.pipeline.options.check_unpacked("save_hf")
    has_adapters = state.pipeline.options.adapter is not None
    if options.merge_adapters and not has_adapters:
        raise ValueError("merge_adapters = True, but this engine has no adapters")
    parameters = list(_parameters_of_engine(state, options.merge_adapters))
    write_folder(Path(path), form, parameters, options, state.pipeline.grid.control)
    if has_adapters and not options.merge_adapters:
        save_adapter(state.pipeline, form, Path(path) / ADAPTER_FOLDER)


def _parameters_of_engine(state: ModelState, merges: bool) -> Iterator[ExportedParameter]:
    """This rank's parameters and persistent buffers, without those of second copies and of adapters.

    merges: adapters are added to the weights that they lie over.
    """
    grid = state.pipeline.grid
    is_ours = (grid.dp_rank, grid.cp_rank, grid.tp_rank) == (0, 0, 0)
    for stage in state.pipeline.stages.values():
        stage.weights_ready()
        for unit, module in stage.units if not stage.suffix else ():
            for own, tensor in module.state_dict().items():
                name = f"{unit}.{own}".replace(".base_layer.", ".")
                if ".lora_" in own or name in state.ties:
                    continue
                fetch = partial(merged_weight, module, own, tensor) if merges else lambda own=tensor: own
                shape, shard = tuple(tensor.shape), state.shards.get(name)
                if shard is not None:
                    group = grid.tp_group if shard.axis == "tp" else grid.ep_group
                    shape, fetch = shard.full_shape, partial(_whole, fetch, shard, group)
                yield ExportedParameter(name, shape, tensor.dtype, fetch, is_ours)


def _whole(fetch: Callable[[], Tensor], shard: Shard, group: dist.ProcessGroup | None) -> Tensor:
    own = fetch()
    if group is None:
        return own
    shards = [shard.on(rank, group.size()) for rank in range(group.size())]
    whole = own.new_empty(shard.full_shape)
    parts = gather_uneven(own, [theirs.length for theirs in shards], group, shard.dim)
    for theirs, part in zip(shards, parts, strict=True):
        theirs.of(whole).copy_(part)
    return whole


def write_folder(
    folder: Path,
    form: HuggingFaceForm,
    parameters: Sequence[ExportedParameter],
    options: ExportOptions,
    control: dist.ProcessGroup | None = None,
) -> None:
    """Write a folder together with the other ranks of `control`, each with the parameters that it has.

    Raises:
        ValueError: the folder exists and is not empty; on every rank.
        OSError: it cannot be written; another error on the other ranks.
    """
    rank = 0 if control is None else control.rank()
    staging = folder.with_name(f".{folder.name}.writing")
    form.describe()
    gather = partial(gather_json, group=control)

    def begin() -> None:
        refuse_used(folder)
        if not folder.parent.is_dir():
            raise ValueError(f"cannot write {folder}: there is no folder {folder.parent}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()

    on_all_ranks(begin if rank == 0 else lambda: None, gather, ValueError)
    try:
        ours = [parameter for parameter in parameters if parameter.is_ours]
        files = list(_cut(ours, form, options))
        names = gather([[name for item in file for name in _names(*item, options)] for file in files])
        num_files = sum(map(len, names))
        first = sum(map(len, names[:rank]))
        paths = [staging / _file_name(number, num_files) for number in range(first, first + len(files))]
        written = dict(zip(paths, files, strict=True))
        theirs = [parameter for parameter in parameters if not parameter.is_ours]
        on_all_ranks(lambda: _write(written, theirs, options), gather, ValueError)
        file_of = {
            name: _file_name(number, num_files)
            for number, file in enumerate(file for of_rank in names for file in of_rank)
            for name in file
        }
        dtype = next((options.torch_dtype(parameter.dtype) for parameter in ours), torch.float32)
        kept: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        if options.quantize:
            kept[KEY] = description(("lm_head",) if form.describe().get("tie_word_embeddings") else ())
        on_all_ranks(
            lambda: _publish(staging, folder, form, kept, file_of) if rank == 0 else None,
            gather,
            ValueError,
        )
    except BaseException:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _names(parameter: ExportedParameter, stored: StoredSlice, options: ExportOptions) -> list[str]:
    return [stored.name, scale_name(stored.name)] if options.rounds(parameter) else [stored.name]


def _cut(
    parameters: Iterable[ExportedParameter], form: HuggingFaceForm, options: ExportOptions
) -> Iterator[list[tuple[ExportedParameter, StoredSlice]]]:
    """The tensors that this rank writes, file by file, each with its parameter."""
    file: list[tuple[ExportedParameter, StoredSlice]] = []
    file_bytes = 0
    for parameter in parameters:
        for stored in form.names.slices(parameter.full_name, parameter.shape):
            num_bytes = options.num_bytes(parameter) * stored.part.num_elements // max(1, math.prod(parameter.shape))
            if file and file_bytes + num_bytes > options.max_shard_bytes:
                yield file
                file, file_bytes = [], 0
            file.append((parameter, stored))
            file_bytes += num_bytes
    if file:
        yield file


def _write(
    files: Mapping[Path, Sequence[tuple[ExportedParameter, StoredSlice]]],
    theirs: Iterable[ExportedParameter],
    options: ExportOptions,
) -> None:
    """Write this rank's files; every parameter is fetched once, in order, since fetching may need other ranks.

    The log names weights that are NaN or infinite: a run may have ended so, and its model gives nothing.
    """
    error: OSError | None = None
    not_finite: list[str] = []
    fetched: tuple[ExportedParameter, Tensor] | None = None
    for path, file in files.items():
        tensors: dict[str, Tensor] = {}
        for parameter, stored in file:
            if fetched is None or fetched[0] is not parameter:
                fetched = parameter, parameter.fetch()
            values = stored.part.of(fetched[1]).view(stored.shape)
            # Numbers of one byte are stored only: PyTorch does not look into them.
            if not (values.float() if values.element_size() == 1 else values).isfinite().all():
                not_finite.append(stored.name)
            if options.rounds(parameter):
                tensors[stored.name], scales = rounded(values)
                tensors[scale_name(stored.name)] = scales[:, None]
                continue
            tensors[stored.name] = values.to("cpu", options.torch_dtype(values.dtype), copy=True).contiguous()
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as caught:
            # The others still wait for this rank's parts.
            error = OSError(f"{path} cannot be written: {caught}")
    for parameter in theirs:
        parameter.fetch()
    if error is not None:
        raise error
    if not_finite:
        count = "a tensor" if len(not_finite) == 1 else f"{len(not_finite)} tensors"
        _logger.warning("%s with weights that are NaN or infinite, such as %s", count, not_finite[0])


def _publish(
    staging: Path,
    folder: Path,
    form: HuggingFaceForm,
    kept: Mapping[str, Any],
    file_of: Mapping[str, str],
) -> None:
    with naming(folder):
        files = sorted(set(file_of.values()))
        if len(files) > 1:
            total_bytes = sum((staging / file).stat().st_size for file in files)
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}
            (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        content = {key: value for key, value in form.describe().items() if key not in ("torch_dtype", KEY)} | dict(kept)
        (staging / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for file in files:
            # safetensors writes for the user alone, whatever the umask.
            shutil.copymode(staging / CONFIG_FILE, staging / file)
        if form.folder is not None:
            for name in TOKENIZER_FILES:
                if (form.folder / name).is_file():
                    shutil.copyfile(form.folder / name, staging / name)
        if form.bytes_end is not None:
            save_byte_tokenizer(staging, form.bytes_end)
            if form.bytes_end:
                ends = {"eos_token_id": list(ByteTokenizer(end_token=True).end_tokens)}
                (staging / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)


def _file_name(number: int, num_files: int) -> str:
    return SINGLE_FILE if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"


# ---- A model's folder rewritten in the other form, a run's or Hugging Face's, by one process


def to_hugging_face(source: Path, destination: Path, options: ExportOptions) -> int | None:
    """Write the model of a run, or of another Hugging Face folder, as a Hugging Face folder.

    Of a run that has trained adapters it is the base, with the adapters in the folder `adapter` inside, or both as one
    with `options.merge_adapters`; memory then holds the whole model, and otherwise the tensors of one file at a time.
    Returns the step of the run's checkpoint; None of a Hugging Face folder.

    Raises:
        ValueError: there is no model, or none that transformers knows, or the destination is not new.
    """
    found = open_folder(source)
    if options.merge_adapters and not found.has_adapters:
        raise ValueError(f"{source} has no adapters to merge")
    if options.quantize and found.has_adapters:
        raise ValueError(f"{source} has adapters; write it with --merge-adapters first, and quantize what is written")
    if options.quantize:
        found.check_quantizable()
    # Any fault of the files is found before one is written.
    units_from_files(found.units, found.names, found.files)
    if not found.has_adapters:
        write_folder(destination, found.form, tuple(_parameters(found)), options)
        return found.step
    units, hidden_size, layout, own, _ = found.arguments(ParallelConfig(device="cpu"))
    pipeline = Pipeline(with_adapter(units, own.adapter, found.form, layout), hidden_size, layout, own)
    state = ModelState(pipeline, Trainer(pipeline))
    try:
        found.load(state)
        export_model(state, found.form, destination, options)
    finally:
        pipeline.close()
    return found.step


def _parameters(found: ModelFolder) -> Iterator[ExportedParameter]:
    for unit in found.units:
        with torch.device("meta"):
            products = joint_weights(unit.build())
        for name, shape, stored in slices_of(unit, found.names):
            if name not in unit.tied and stored:
                word = found.files.tensors[stored[0].name].dtype
                dtype = torch.float32 if word == INT8 else DTYPES[word]
                fetch = partial(_assembled, found.files, stored, shape, dtype)
                yield ExportedParameter(unit.full_name(name), shape, dtype, fetch, is_product=name in products)


def _assembled(files: WeightFiles, stored: tuple[StoredSlice, ...], shape: Shape, dtype: torch.dtype) -> Tensor:
    whole = torch.empty(shape, dtype=dtype)
    for name, indices, into in copies(stored, TensorSlice.whole(shape), whole):
        into.copy_(files.read(name, indices))
    return whole


def to_run(source: Path, destination: Path, dtype: str | None) -> int | None:
    """Write the model of a folder as the first checkpoint of a run, for `model.pretrained`, scoring and generation.

    Returns the step of the checkpoint, where the folder is a run's; None of a Hugging Face folder.

    Raises:
        ValueError: there is no model, or the destination is not new.
    """
    if dtype is not None and dtype not in list(Precision):
        raise ValueError(f"a run's dtype {dtype!r} is none of {', '.join(Precision)}")
    refuse_used(destination)
    found = open_folder(source, quiet=True)
    config = with_pretrained(
        RunConfig(
            output=str(destination),
            model=ModelConfig(pretrained=str(source)),
            data=DataConfig(tokenizer="bytes" if found.tokenizer is None else found.tokenizer_name),
            train=TrainConfig(precision=None if dtype is None else Precision(dtype)),
        )
    )
    units, hidden_size, layout, options, _ = engine_arguments(config, config.model.vocab_size or 0)
    pipeline = Pipeline(units, hidden_size, layout, options)
    state = ModelState(pipeline, Trainer(pipeline))
    before = destination.exists()
    folder = RunLock(config)
    try:
        saved = Checkpointer(destination / CHECKPOINT_FOLDER, pipeline.grid, config.identity(), aliases=state.ties)
        saved.save(0, state.state(optimizer=False), extra={}, wait=True)
    except BaseException:
        folder.close()
        for own in (CHECKPOINT_FOLDER, MODEL_FOLDER):
            shutil.rmtree(destination / own, ignore_errors=True)
        (destination / RUN_FILE).unlink(missing_ok=True)
        if not before:
            shutil.rmtree(destination, ignore_errors=True)
        raise
    finally:
        pipeline.close()
    folder.close()
    return found.step

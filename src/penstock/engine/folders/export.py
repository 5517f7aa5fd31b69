"""A model written as a Hugging Face folder that transformers loads: whole, or not at all."""

from __future__ import annotations

import json
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
from penstock.engine.adapter import merged_weight, save_adapter, with_adapter
from penstock.engine.folders.model_folder import ModelFolder, open_folder
from penstock.engine.folders.runs import TOKENIZER_FILES
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
    description,
    scale_name,
    slices_of,
    units_from_files,
)
from penstock.model.linear import joint_weights
from penstock.parallel.collectives import gather_uneven
from penstock.parallel.host import gather_on_all_ranks, on_all_ranks
from penstock.parallel.tensor_slice import Shape, Shard, TensorSlice
from penstock.settings import ParallelConfig
from penstock.settings.declare import checked

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}


@checked
@dataclass(frozen=True)
class ExportOptions:
    """Options of an exported model.

    dtype: "fp32", "fp64", "bf16" or "fp16"; None keeps the dtype of the parameters. max_shard_bytes: of one file; a
    larger tensor has a file of its own. merge_adapters: add LoRA adapters to the weights; otherwise the base weights
    are written unchanged, and the adapters into the folder `adapter` inside. quantize: write the weights of products as
    8-bit numbers.

    Raises: ValueError for another dtype.
    """

    dtype: str | None = None
    max_shard_bytes: int = 5 * 10**9
    merge_adapters: bool = False
    quantize: bool = False

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")

    def rounds(self, parameter: ExportedParameter) -> bool:
        """True for parameters that become 8-bit numbers."""
        return self.quantize and parameter.is_product

    def torch_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None else _DTYPES[self.dtype]


@dataclass(frozen=True)
class ExportedParameter:
    """One parameter of a model to export."""

    full_name: str
    shape: Shape
    dtype: torch.dtype
    #: returns the whole parameter, on any device; called once, on all ranks that share it, in one order
    fetch: Callable[[], Tensor]
    #: False if another rank writes it and this one only takes part in `fetch`
    is_written_here: bool = True
    #: True for weights of products, which can be written as 8-bit numbers
    is_product: bool = False


def export_model(
    state: ModelState,
    form: HuggingFaceForm | None,
    path: Path | str,
    options: ExportOptions,
) -> None:
    """Write a model as a new Hugging Face folder; all ranks call this at the same point.

    form: the model's names and configuration in transformers; None if it has none.

    Raises:
        ValueError: the model has no form in transformers, or the folder is not empty; on all ranks alike.
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
        save_adapter(state.pipeline, form, Path(path) / "adapter")


def _parameters_of_engine(state: ModelState, merges: bool) -> Iterator[ExportedParameter]:
    """This rank's parameters and persistent buffers, without those of second copies and of adapters."""
    grid = state.pipeline.grid
    for stage in state.pipeline.model.stages.values():
        stage.wait_for_weights()
        for unit, module in stage.units if not stage.suffix else ():
            for key, tensor in module.state_dict().items():
                name = f"{unit}.{key}".replace(".base_layer.", ".")
                if ".lora_" in key or name in state.ties:
                    continue
                fetch = partial(merged_weight, module, key, tensor) if merges else lambda values=tensor: values
                shape, shard = tuple(tensor.shape), state.shards.get(name)
                if shard is not None:
                    group = grid.tp_group if shard.axis == "tp" else grid.ep_group
                    shape, fetch = shard.full_shape, partial(_whole, fetch, shard, group)
                yield ExportedParameter(name, shape, tensor.dtype, fetch, grid.is_first_of_stages)


def _whole(fetch: Callable[[], Tensor], shard: Shard, group: dist.ProcessGroup | None) -> Tensor:
    part = fetch()
    if group is None:
        return part
    shards = [shard.on(rank, group.size()) for rank in range(group.size())]
    whole = part.new_empty(shard.full_shape)
    parts = gather_uneven(part, [rank_shard.length for rank_shard in shards], group, shard.dim)
    for rank_shard, rank_part in zip(shards, parts, strict=True):
        rank_shard.of(whole).copy_(rank_part)
    return whole


def write_folder(
    folder: Path,
    form: HuggingFaceForm,
    parameters: Sequence[ExportedParameter],
    options: ExportOptions,
    control: dist.ProcessGroup | None = None,
) -> None:
    """Write a folder together with the other ranks of `control`, each its own parameters.

    Raises:
        ValueError: the folder exists and is not empty; on every rank.
        OSError: this rank cannot write; a RuntimeError on the others.
    """
    rank = 0 if control is None else control.rank()
    staging = folder.with_name(f".{folder.name}.writing")
    form.describe()

    def begin() -> None:
        refuse_used(folder)
        if not folder.parent.is_dir():
            raise ValueError(f"cannot write {folder}: there is no folder {folder.parent}")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir()

    on_all_ranks(begin if rank == 0 else lambda: None, control, ValueError)
    try:
        files = gather_on_all_ranks(lambda: _write(staging / str(rank), form, parameters, options), control, ValueError)
        dtype = next((options.torch_dtype(parameter.dtype) for parameter in parameters), torch.float32)
        fields: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch.")}
        if form.bytes_end:
            fields["eos_token_id"] = list(ByteTokenizer(end_token=True).end_tokens)
        if options.quantize:
            fields[KEY] = description(("lm_head",) if form.describe().get("tie_word_embeddings") else ())
        on_all_ranks(
            lambda: _publish(staging, folder, form, fields, files) if rank == 0 else None,
            control,
            ValueError,
        )
    except BaseException:
        if rank == 0:
            shutil.rmtree(staging, ignore_errors=True)
        raise


def _write(
    prefix: Path,
    form: HuggingFaceForm,
    parameters: Iterable[ExportedParameter],
    options: ExportOptions,
) -> list[list[str]]:
    """Write this rank's files, named `prefix` and a number; returns the names of each file's tensors."""
    files: list[list[str]] = []
    tensors: dict[str, Tensor] = {}
    error: OSError | None = None

    def end_file() -> None:
        nonlocal error
        try:
            save_file(tensors, f"{prefix}-{len(files)}", metadata={"format": "pt"})
        except (OSError, SafetensorError) as caught:
            # Raised later: other ranks still wait for this rank's parts.
            error = OSError(f"{prefix.parent} cannot be written: {caught}")
        files.append([*tensors])
        tensors.clear()

    for parameter in parameters:
        whole = parameter.fetch()
        for stored in form.names.slices(parameter.full_name, parameter.shape) if parameter.is_written_here else ():
            values = stored.part.of(whole).view(stored.shape)
            if options.rounds(parameter):
                weight, scales = rounded(values)
                new_tensors = {stored.name: weight, scale_name(stored.name): scales[:, None]}
            else:
                new_tensors = {stored.name: values.to("cpu", options.torch_dtype(values.dtype), copy=True).contiguous()}
            file_bytes = sum(tensor.nbytes for tensor in (*tensors.values(), *new_tensors.values()))
            if tensors and file_bytes > options.max_shard_bytes:
                end_file()
            tensors.update(new_tensors)
    if tensors:
        end_file()
    if error is not None:
        raise error
    return files


def _publish(
    staging: Path,
    folder: Path,
    form: HuggingFaceForm,
    fields: Mapping[str, Any],
    files: Sequence[Sequence[Sequence[str]]],
) -> None:
    """Give all files their public names, add index, configuration and tokenizer, and rename the folder.

    files: the names of the tensors in each file of each rank.
    """
    with naming(folder):
        written = [
            (f"{rank}-{i}", file_tensors)
            for rank, rank_files in enumerate(files)
            for i, file_tensors in enumerate(rank_files)
        ]
        file_of: dict[str, str] = {}
        for number, (name, tensors) in enumerate(written, 1):
            public = SINGLE_FILE if len(written) == 1 else f"model-{number:05d}-of-{len(written):05d}.safetensors"
            (staging / name).rename(staging / public)
            file_of |= dict.fromkeys(tensors, public)
        if len(written) > 1:
            total_bytes = sum((staging / file).stat().st_size for file in set(file_of.values()))
            index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}
            (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        config = {key: value for key, value in form.describe().items() if key not in ("torch_dtype", KEY)}
        content = {**config, **fields}
        (staging / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        for file in set(file_of.values()):
            # safetensors ignores the umask and writes files that only the user may read.
            shutil.copymode(staging / CONFIG_FILE, staging / file)
        if form.folder is not None:
            for name in TOKENIZER_FILES:
                if (form.folder / name).is_file():
                    shutil.copyfile(form.folder / name, staging / name)
        if form.bytes_end is not None:
            save_byte_tokenizer(staging, form.bytes_end)
        if folder.exists():
            folder.rmdir()
        staging.rename(folder)


# ---- The model of a folder, a run's or Hugging Face's, by one process


def to_hugging_face(source: Path, destination: Path, options: ExportOptions) -> int | None:
    """Write the model of a run, or of another Hugging Face folder, as a Hugging Face folder.

    A run that has trained adapters gives the base model, with the adapters in the folder `adapter` inside, or both
    merged with `options.merge_adapters`. Memory then holds the whole model, else the tensors of one file at a time.
    Returns the step of the run's checkpoint; None for a Hugging Face folder.

    Raises: ValueError for a folder without a model that transformers knows, or a destination that is not empty.
    """
    folder = open_folder(source)
    if options.merge_adapters and not folder.has_adapters:
        raise ValueError(f"{source} has no adapters to merge")
    if options.quantize:
        folder.check_quantizable()
    # Any fault of the files is found before one is written.
    units_from_files(folder.units, folder.names, folder.files)
    if not folder.has_adapters:
        write_folder(destination, folder.form, tuple(_parameters(folder)), options)
        return folder.step
    units, hidden_size, layout, engine_options, _ = folder.arguments(ParallelConfig(device="cpu"))
    pipeline = Pipeline(
        with_adapter(units, engine_options.adapter, folder.form, layout), hidden_size, layout, engine_options
    )
    state = ModelState(pipeline, Trainer(pipeline))
    try:
        folder.load(state)
        export_model(state, folder.form, destination, options)
    finally:
        pipeline.close()
    return folder.step


def _parameters(folder: ModelFolder) -> Iterator[ExportedParameter]:
    for unit in folder.units:
        with torch.device("meta"):
            products = joint_weights(unit.build())
        for name, shape, stored in slices_of(unit, folder.names):
            if name not in unit.tied and stored:
                word = folder.files.tensors[stored[0].name].dtype
                dtype = torch.float32 if word == INT8 else DTYPES[word]

                def fetch(shape: Shape = shape, dtype: torch.dtype = dtype, stored: Any = stored) -> Tensor:
                    return folder.files.fill(torch.empty(shape, dtype=dtype), stored, TensorSlice.whole(shape))

                yield ExportedParameter(unit.full_name(name), shape, dtype, fetch, is_product=name in products)

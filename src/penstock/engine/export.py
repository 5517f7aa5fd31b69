"""A model written as a Hugging Face folder that transformers loads: whole, or not at all.

Every rank writes the files of what it holds, none larger than asked for; rank 0 adds index, config.json and tokenizer,
and gives the folder its name at the end.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.pretrained import HuggingFaceForm
from penstock.engine.state import ModelState
from penstock.model import Shard
from penstock.model.hf.config_json import CONFIG_FILE
from penstock.model.hf.files import INDEX_FILE, SINGLE_FILE
from penstock.model.hf.load import Piece
from penstock.parallel.collectives import gather_uneven
from penstock.parallel.host import gather_json, on_all_ranks

MAX_SHARD_BYTES = 5 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}

Progress = Callable[[int], None]
"""Told after each file how many bytes it has."""


@dataclass(frozen=True)
class ExportOptions:
    """How a model is written.

    dtype: "fp32", "fp64", "bf16" or "fp16"; None keeps what the parameters have. max_shard_bytes: of one file; a
    tensor that is larger has a file of its own.

    Raises: ValueError for another dtype, or files of no size.
    """

    dtype: str | None = None
    max_shard_bytes: int = MAX_SHARD_BYTES

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(_DTYPES)}")
        if self.max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes={self.max_shard_bytes}: a file holds at least a byte")

    def torch_dtype(self, own: torch.dtype) -> torch.dtype:
        return own if self.dtype is None else _DTYPES[self.dtype]


@dataclass(frozen=True)
class Parameter:
    """One whole parameter to be written: `fetch` gives its values, on any device, once and when its turn has come."""

    full_name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fetch: Callable[[], Tensor]


def export_model(state: ModelState, form: HuggingFaceForm | None, folder: Path | str, options: ExportOptions) -> None:
    """Write a model in this form as a new folder; all ranks call this at the same point.

    Raises:
        ValueError: the model has no form that transformers knows, or the folder holds something; on all ranks alike.
    """
    if form is None:
        raise ValueError("this engine's model was given as layers, for which transformers has no config.json")
    parameters = [_parameter(state, name, own) for name, own in _tensors(state) if name not in state.ties]
    grid = state.pipeline.grid
    writes = (grid.dp_rank, grid.cp_rank, grid.tp_rank) == (0, 0, 0)
    share = Share(parameters if writes else (), () if writes else parameters)
    write_folder(Path(folder), form, share, options, grid.control)


def _tensors(state: ModelState) -> Iterator[tuple[str, Tensor]]:
    """This rank's parameters and lasting buffers by full name, those of second copies left out."""
    for stage in state.pipeline.stages.values():
        stage.weights_ready()
        for unit, module in stage.units if not stage.suffix else ():
            yield from ((f"{unit}.{own}", tensor) for own, tensor in module.state_dict().items())


def _parameter(state: ModelState, name: str, own: Tensor) -> Parameter:
    shard, grid = state.shards.get(name), state.pipeline.grid
    if shard is None:
        return Parameter(name, tuple(own.shape), own.dtype, lambda: own)
    group = grid.tp_group if shard.axis == "tp" else grid.ep_group
    return Parameter(name, shard.full_shape, own.dtype, lambda: _whole(own, shard, group))


def _whole(own: Tensor, shard: Shard, group: dist.ProcessGroup | None) -> Tensor:
    """The whole parameter on every rank of the group that shares it."""
    if group is None:
        return own
    places = [replace(shard, index=rank * shard.count // group.size()) for rank in range(group.size())]
    whole = own.new_empty(shard.full_shape)
    parts = gather_uneven(own, [place.length for place in places], group, shard.dim)
    for place, part in zip(places, parts, strict=True):
        place.of(whole).copy_(part)
    return whole


@dataclass(frozen=True)
class Share:
    """What a rank has of a model to be written: parameters it writes, and those of which it only gives its part."""

    written: Sequence[Parameter]
    given: Sequence[Parameter] = ()


def write_folder(
    folder: Path,
    form: HuggingFaceForm,
    share: Share,
    options: ExportOptions,
    control: dist.ProcessGroup | None = None,
    progress: Progress = lambda num_bytes: None,
) -> None:
    """Write a folder of which this rank has a share; every rank of `control` calls this alike.

    Raises:
        ValueError: the folder exists and is not empty; on every rank.
        OSError: it can not be written; another error on the other ranks.
    """
    rank = 0 if control is None else control.rank()
    staging = folder.with_name(f".{folder.name}.writing")
    form.describe()
    gather = partial(gather_json, group=control)
    on_all_ranks(lambda: _stage(folder, staging) if rank == 0 else None, gather, ValueError)
    files = list(_cut(share.written, form, options))
    told = gather([[[t.piece.stored, t.num_bytes] for t in file] for file in files])
    num_files = sum(map(len, told))
    first = sum(map(len, told[:rank]))
    paths = [staging / _file_name(number, num_files) for number in range(first, first + len(files))]
    written = dict(zip(paths, files, strict=True))
    on_all_ranks(lambda: _write(written, share.given, options, progress), gather, ValueError)
    placed = {
        stored: _file_name(number, num_files)
        for number, file in enumerate(file for of_rank in told for file in of_rank)
        for stored, _ in file
    }
    dtype = next((options.torch_dtype(p.dtype) for p in share.written), torch.float32)
    on_all_ranks(lambda: _publish(staging, folder, form, dtype, placed) if rank == 0 else None, gather, ValueError)


@dataclass(frozen=True)
class _Stored:
    """A tensor of a file: a piece of a parameter."""

    parameter: Parameter
    piece: Piece
    num_bytes: int


def _cut(parameters: Iterable[Parameter], form: HuggingFaceForm, options: ExportOptions) -> Iterator[list[_Stored]]:
    """The rank's tensors, file by file."""
    file: list[_Stored] = []
    held_bytes = 0
    for parameter in parameters:
        for piece in form.names.pieces(parameter.full_name, parameter.shape):
            shape = piece.shape(parameter.shape)
            num_bytes = torch.Size(shape).numel() * options.torch_dtype(parameter.dtype).itemsize
            if file and held_bytes + num_bytes > options.max_shard_bytes:
                yield file
                file, held_bytes = [], 0
            file.append(_Stored(parameter, piece, num_bytes))
            held_bytes += num_bytes
    if file:
        yield file


def _write(
    files: Mapping[Path, Sequence[_Stored]], given: Iterable[Parameter], options: ExportOptions, progress: Progress
) -> None:
    """Write this rank's files; every parameter is fetched once, in order, since fetching may need other ranks."""
    error: OSError | None = None
    held: tuple[Parameter, Tensor] | None = None
    for path, stored in files.items():
        tensors: dict[str, Tensor] = {}
        for tensor in stored:
            if held is None or held[0] is not tensor.parameter:
                held = tensor.parameter, tensor.parameter.fetch()
            values = held[1][tensor.piece.place]
            tensors[tensor.piece.stored] = values.to("cpu", options.torch_dtype(values.dtype), copy=True).contiguous()
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as caught:
            # The others still wait for this rank's parts.
            error = OSError(f"{path} can not be written: {caught}")
        progress(sum(tensor.num_bytes for tensor in stored))
    for parameter in given:
        parameter.fetch()
    if error is not None:
        raise error


def _stage(folder: Path, staging: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already and was left as it is; give the name of a new folder")
    if not folder.parent.is_dir():
        raise ValueError(f"cannot write {folder}: there is no folder {folder.parent}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()


def _publish(
    staging: Path,
    folder: Path,
    form: HuggingFaceForm,
    dtype: torch.dtype,
    placed: Mapping[str, str],
) -> None:
    files = sorted(set(placed.values()))
    if len(files) > 1:
        total_bytes = sum((staging / file).stat().st_size for file in files)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(placed.items()))}
        (staging / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    content: dict[str, Any] = {key: value for key, value in form.describe().items() if key != "torch_dtype"}
    content["dtype"] = str(dtype).removeprefix("torch.")
    (staging / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    if form.folder is not None:
        for name in TOKENIZER_FILES:
            if (form.folder / name).is_file():
                shutil.copyfile(form.folder / name, staging / name)
    if folder.exists():
        folder.rmdir()
    staging.rename(folder)


def _file_name(number: int, num_files: int) -> str:
    return SINGLE_FILE if num_files == 1 else f"model-{number + 1:05d}-of-{num_files:05d}.safetensors"

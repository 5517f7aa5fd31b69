"""A folder of safetensors files, one or several with an index, and the loading of its tensors into a model's units.

All errors in the files are found in their headers, before any value is read. A parameter may consist of several stored
tensors (one for each expert), and a rank may hold only a part of it. Each stored tensor is cut to that part first, so
only values that are kept are read.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.io.files import check_file, read_json_object, refuse_link_out
from penstock.model.units import UnitSpec
from penstock.parallel.tensor_slice import Shape, StoredSlice, TensorSlice, copies

# ---- 8-bit weights, in the form "int-quantized" of compressed-tensors


KEY = "quantization_config"
INT8 = "I8"
_FORMAT = "int-quantized"


def scale_name(weight: str) -> str:
    """The name of a weight's scales."""
    return f"{weight}_scale"


def description(ignored: tuple[str, ...]) -> dict[str, Any]:
    """The `quantization_config` of a folder of 8-bit weights, but for the modules named."""
    number = {"num_bits": 8, "type": "int", "symmetric": True}
    weights, activations = number | {"strategy": "channel"}, number | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
    }


def is_quantized(content: Mapping[str, Any]) -> bool:
    """True if a config.json describes 8-bit weights in this form.

    Raises: ValueError for any other form of quantized weights.
    """
    found = content.get(KEY)
    if found is None:
        return False
    given = found if isinstance(found, Mapping) else {}
    if given.get("format") != _FORMAT:
        form = given.get("format") or given.get("quant_method") or found
        raise ValueError(
            f"its weights are quantized as {str(form)[:60]!r}, which is not read; 8-bit weights with a scale for each "
            f'output are ("{_FORMAT}" of compressed-tensors), and penstock convert --quantize int8 writes them'
        )
    return True


# ---- The files


# Of two tensors that are compared, so many are read at a time.
_COMPARED_ROWS = 4096
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""The format's words for the dtypes that models have."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


class MissingFile(FileNotFoundError, ValueError):
    """A file or folder of a model is missing; the message has its path. Also a ValueError, as other users' mistakes."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's file, shape and dtype."""

    file: Path
    shape: tuple[int, ...]
    #: in the format's words (``F32``)
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a folder by name, as their headers describe them."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, folder: Path) -> "WeightFiles":
        """Read the headers of all files of a folder whose config.json has been read.

        Raises:
            MissingFile: a file is missing; names its path.
            ValueError: a file is truncated or not a safetensors file, an index names a missing tensor, or the folder
                has only pickles.
        """
        file, index = folder / SINGLE_FILE, folder / INDEX_FILE
        if file.exists() and not index.exists():
            return cls(folder, _read_header(file))
        if not index.exists():
            if pickles := sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern)):
                raise ValueError(
                    f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code and is never read; "
                    "save the model as safetensors"
                )
            raise MissingFile(f"{file} is missing, and there is no {INDEX_FILE} beside it")
        named = _read_index(index)
        headers = {name: _read_header(folder / name) for name in sorted(set(named.values()))}
        for tensor, file in named.items():
            if tensor not in headers[file]:
                raise ValueError(f"{index} says that {tensor} is in {file}, but it is not")
        return cls(folder, {tensor: headers[file][tensor] for tensor, file in named.items()})

    @classmethod
    def of_files(cls, folder: Path, names: Iterable[str]) -> "WeightFiles":
        """Read the headers of these files of a folder. Raises: as `open`."""
        return cls(folder, {k: tensor for name in names for k, tensor in _read_header(folder / name).items()})

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """Read the tensor of that name, or a part of it, as a view of the file: copy it and drop it.

        8-bit weights are multiplied by their scales, into fp32.
        """
        with safe_open(self.tensors[name].file, framework="pt") as file:
            values = file.get_slice(name)[part] if part else file.get_tensor(name)
        scales = scale_name(name)
        if self.tensors[name].dtype != INT8 or scales not in self.tensors:
            return values
        return values.float() * self.read(scales, part[:1]).float()

    def differ(self, name: str, other: str) -> bool:
        """True if both tensors are there and have other values; transformers then takes neither for the other."""
        if name not in self.tensors or other not in self.tensors:
            return False
        shape = self.tensors[name].shape
        if shape != self.tensors[other].shape:
            return True
        rows = [slice(begin, begin + _COMPARED_ROWS) for begin in range(0, shape[0], _COMPARED_ROWS)]
        return not all(torch.equal(self.read(name, (part,)), self.read(other, (part,))) for part in rows)

    def fill(self, target: Tensor, stored: Iterable[StoredSlice], part: TensorSlice) -> Tensor:
        """Copy into a tensor, which has these elements of a parameter, what its stored tensors have of them."""
        for name, indices, into in copies(stored, part, target):
            into.copy_(self.read(name, indices))
        return target


def refuse_unfit_files(folder: Path) -> None:
    """Refuse the folder of a model or a checkpoint that has links out of it, devices, or texts of any size.

    In Hugging Face's cache the files of ``snapshots/REVISION`` are links to ``blobs``, all within one model's folder.

    Raises:
        ValueError: names the file, and where a link leads.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots" and (root.parent.parent / "blobs").is_dir():
        root = root.parent.parent
    for path in sorted(folder.rglob("*")):
        refuse_link_out(path, root)
        check_file(path)


def _read_index(index: Path) -> dict[str, str]:
    try:
        named = read_json_object(index)["weight_map"]
        files = {str(tensor): str(file) for tensor, file in named.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is no index of safetensors files: it has no weight_map") from None
    for file in files.values():
        # An index could point anywhere, for instance at private files.
        if Path(file).name != file:
            raise ValueError(f"{index} names {file!r}, which is not a file beside it")
        if not file.endswith(".safetensors"):
            raise ValueError(f"{index} names {file!r}; only safetensors files are read")
    return files


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the header, which safetensors checks against the file's size."""
    if not path.exists():
        raise MissingFile(f"{path} is missing")
    check_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = file.keys()
            parts = {name: file.get_slice(name) for name in names}
            return {name: StoredTensor(path, tuple(p.get_shape()), p.get_dtype()) for name, p in parts.items()}
    except (SafetensorError, OSError) as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise ValueError(f"{path} is no safetensors file, or was cut short or altered: {reason}") from None


# ---- A model's units and the files


class Names(ABC):
    """A model's names in files."""

    @abstractmethod
    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]:
        """The stored tensors that make up the parameter of that full name and whole shape."""

    @abstractmethod
    def is_surplus(self, stored: str) -> bool:
        """True for a stored tensor that no parameter needs."""

    def in_transformers(self, full_name: str, shape: Shape) -> tuple[str, ...]:
        """The names of a parameter's parts in transformers' own model."""
        return tuple(stored.name for stored in self.slices(full_name, shape))


def units_from_files(units: Sequence[UnitSpec], names: Names, files: WeightFiles) -> tuple[UnitSpec, ...]:
    """The units with values from the files instead of random ones.

    Raises:
        ValueError: a tensor is missing, has another shape than its parameter, or belongs to no parameter.
    """
    _check(units, names, files)
    return tuple(replace(unit, initialise=partial(_load, unit, names, files)) for unit in units)


def _state_on_meta(unit: UnitSpec) -> dict[str, Tensor]:
    """A unit's own parameters and persistent buffers without values, by name in the module."""
    with torch.device("meta"):
        return unit.build().state_dict(keep_vars=True)


def slices_of(unit: UnitSpec, names: Names) -> Iterator[tuple[str, Shape, tuple[StoredSlice, ...]]]:
    """Yield each tensor of a unit: its name in the module, its whole shape and its stored slices."""
    for name, tensor in _state_on_meta(unit).items():
        shape = unit.sharding[name].full_shape if name in unit.sharding else tuple(tensor.shape)
        yield name, shape, names.slices(unit.tied.get(name, unit.full_name(name)), shape)


def _check(units: Sequence[UnitSpec], names: Names, files: WeightFiles) -> None:
    """Compare the whole model's names and shapes with the files; every rank finds the same errors."""
    unread = set(files.tensors)
    for unit in units:
        dtypes = {name: tensor.dtype for name, tensor in _state_on_meta(unit).items()}
        for name, _, slices in slices_of(unit, names):
            for wanted in slices:
                unread -= {wanted.name, scale_name(wanted.name)}
                stored = files.tensors.get(wanted.name)
                if stored is None:
                    raise ValueError(f"{files.folder} lacks {wanted.name}, which is {unit.full_name(name)}")
                dtype, scales = DTYPES.get(stored.dtype), files.tensors.get(scale_name(wanted.name))
                is_scaled = stored.dtype == INT8 and scales is not None and scales.shape == (*stored.shape[:1], 1)
                # Numbers of another kind than the model's, such as weights in a form of quantization that is not known.
                if not is_scaled and (dtype is None or dtype.is_floating_point < dtypes[name].is_floating_point):
                    raise ValueError(
                        f"{wanted.name} in {stored.file} is of the type {stored.dtype}, which is not read as "
                        f"{dtypes[name]}; save the model with its weights in F32, BF16 or F16, or in {INT8} with a "
                        "scale for each output"
                    )
                if stored.shape != wanted.shape:
                    raise ValueError(
                        f"{wanted.name} in {stored.file} has the shape {list(stored.shape)}, but config.json makes it "
                        f"{list(wanted.shape)}"
                    )
    strangers = sorted(stored for stored in unread if not names.is_surplus(stored))
    if strangers:
        raise ValueError(f"{files.folder} holds tensors that the model of its config.json has not: {strangers[:3]}")


@torch.no_grad()
def _load(unit: UnitSpec, names: Names, files: WeightFiles, module: nn.Module, seed: int) -> None:
    """Set a unit's parameters and persistent buffers to their stored values, one at a time; meta ones become real.

    Tensors that the files have no place for are initialised as in a new model.
    """
    found = list(slices_of(unit, names))
    if not all(stored for _, _, stored in found):
        unit.initialise(module, seed)
    tensors = module.state_dict(keep_vars=True)
    for name, shape, stored in found:
        tensor = tensors[name]
        part = unit.sharding[name].part if name in unit.sharding else TensorSlice.whole(shape)
        target = files.fill(torch.empty(tensor.shape, dtype=tensor.dtype) if tensor.is_meta else tensor, stored, part)
        if target is not tensor:
            path, _, own = name.rpartition(".")
            if isinstance(tensor, nn.Parameter):
                target = nn.Parameter(target, tensor.requires_grad)
            setattr(module.get_submodule(path), own, target)

"""A folder of safetensors files, one or several with an index, read tensor by tensor.

All errors in the files are found in their headers, before any value is read.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""


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
        """Read the headers of all files.

        Raises:
            MissingFile: with the path of the missing folder or file.
            ValueError: a file is truncated or no safetensors file, an index names a missing tensor, or the folder has
                only pickles.
        """
        if not folder.is_dir():
            raise MissingFile(f"there is no folder {folder} to read a model from")
        index = folder / INDEX_FILE
        if not index.exists():
            return cls(folder, _read_header(_single_file(folder)))
        named = _read_index(index)
        headers = {name: _read_header(folder / name) for name in sorted(set(named.values()))}
        for tensor, file in named.items():
            if tensor not in headers[file]:
                raise ValueError(f"{index} says that {tensor} is in {file}, but it is not")
        return cls(folder, {tensor: headers[file][tensor] for tensor, file in named.items()})

    @classmethod
    def of_files(cls, folder: Path, names: Iterable[str]) -> "WeightFiles":
        """The tensors of these files of a folder. Raises: as `open`."""
        return cls(folder, {k: tensor for name in names for k, tensor in _read_header(folder / name).items()})

    def read(self, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        """The tensor of that name, or a part of it, as a view of the file: copy it and drop it."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            return file.get_slice(name)[part] if part else file.get_tensor(name)


def _single_file(folder: Path) -> Path:
    file = folder / SINGLE_FILE
    if file.exists():
        return file
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code and is never read; "
            "save the model as safetensors"
        )
    raise MissingFile(f"{file} is missing, and there is no {INDEX_FILE} beside it")


def _read_index(index: Path) -> dict[str, str]:
    try:
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
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
    if not path.exists():
        raise MissingFile(f"{path} is missing")
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        header_bytes = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file, or was cut short: it has {size_bytes} bytes")
        try:
            header: dict[str, Any] = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            ends_bytes = [entry["data_offsets"][1] for entry in header.values()]
            found = {name: StoredTensor(path, tuple(e["shape"]), str(e["dtype"])) for name, e in header.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            raise ValueError(f"{path} is no safetensors file, or was cut short: its header cannot be read") from None
    expected_bytes = _LENGTH_BYTES + header_bytes + max(ends_bytes, default=0)
    if size_bytes != expected_bytes:
        raise ValueError(f"{path} has {size_bytes} bytes instead of {expected_bytes}: it was cut short or altered")
    return found

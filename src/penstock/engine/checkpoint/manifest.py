"""The manifest of a published checkpoint, and the checks by which a checkpoint counts as intact.

A checkpoint is a folder ``step-00000100`` of safetensors files and one ``manifest.json``: step, the run's identity,
every rank's JSON values, every tensor's shape and type, every file's size and SHA-256, and a SHA-256 of the rest of
the manifest. Numbers and text alone: reading a checkpoint runs no code of it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.io.files import open_file, parse_json, read_bytes, write_durably
from penstock.model.hf.files import Names
from penstock.parallel.tensor_slice import Shape, StoredSlice, TensorSlice
from penstock.settings.run import MAY_CHANGE, differences

MANIFEST = "manifest.json"
OWNER_FILE = "run.json"
"""The file beside a run's checkpoints with its identity; it is written before the first step."""
TENSOR_SUFFIX = ".safetensors"
ATTRIBUTE = "attribute"
"""Begins the names of layers' attributes in older checkpoints, which are no longer state."""
_FORMAT = "penstock-checkpoint-1"
_PREFIX = "step-"
_logger = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, on this rank or another; earlier ones are intact.

    >>> raise CheckpointError("step 7 could not be saved: rank 1: runs/demo: no space left")
    Traceback (most recent call last):
    penstock.engine.checkpoint.manifest.CheckpointError: step 7 could not be saved: rank 1: runs/demo: no space left
    """


class DamagedCheckpoint(ValueError):
    """A checkpoint's files do not agree with its manifest."""


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor."""

    #: the name of the whole tensor
    of: str
    #: the slice of it that is stored
    part: TensorSlice
    #: name in torch: ``float32``
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape

    @property
    def stored_name(self) -> str:
        """The name in the file: the tensor's own, with the place of a part: ``layers.0.mlp.up.weight[0:64,0:128]``."""
        return self.of if self.part.is_whole else f"{self.of}{self.part}"

    def __str__(self) -> str:
        return f"{list(self.shape)} of {self.dtype}"

    def to_json(self) -> dict[str, Any]:
        plain = {"shape": list(self.shape), "dtype": self.dtype}
        if self.part.is_whole:
            return plain
        return plain | {"of": self.of, "start": list(self.part.start), "of_shape": list(self.part.full_shape)}

    @classmethod
    def from_json(cls, name: str, content: Mapping[str, Any]) -> TensorRecord:
        """The record of the stored tensor of that name."""
        shape = tuple(content["shape"])
        if "of" not in content:
            return cls(name, TensorSlice.whole(shape), content["dtype"])
        part = TensorSlice(tuple(content["start"]), shape, tuple(content["of_shape"]))
        return cls(content["of"], part, content["dtype"])


def check_cover(records: Mapping[str, TensorRecord]) -> None:
    """Refuse slices that do not make up their wholes. Raises: ValueError naming one."""
    counts: dict[tuple[str, Shape], int] = {}
    for record in records.values():
        key = record.of, record.part.full_shape
        counts[key] = counts.get(key, 0) + record.part.num_elements
    for (name, shape), count in counts.items():
        if count != math.prod(shape):
            raise ValueError(f"the ranks hold {count} elements of {name}, which has {math.prod(shape)}, {list(shape)}")


@dataclass(frozen=True)
class CheckpointInfo(Names):
    """One published checkpoint, which gives a model's tensors whole or in the slices that ranks had."""

    path: Path
    #: optimizer steps taken before it
    step: int
    #: the settings that identify the run
    identity: Mapping[str, Any]
    #: each rank's JSON value, in rank order
    rank_values: tuple[Any, ...]
    #: stored name -> the tensor
    tensors: Mapping[str, TensorRecord]
    #: file name -> its ``size_bytes`` and ``sha256``
    files: Mapping[str, Mapping[str, Any]]

    @property
    def extra(self) -> Any:
        """Rank 0's JSON value."""
        return self.rank_values[0]

    @cached_property
    def stored(self) -> dict[str, tuple[StoredSlice, ...]]:
        """The stored slices of each tensor, by the tensor's name."""
        slices: dict[str, tuple[StoredSlice, ...]] = {}
        for name, record in self.tensors.items():
            slices[record.of] = (*slices.get(record.of, ()), StoredSlice(name, record.part))
        return slices

    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]:
        """The stored slices of a parameter; empty for one that only training uses and this run did not have."""
        only_in_training = ".balance." in full_name or ".predictions." in full_name
        under_adapter = ".base_layer.".join(full_name.rsplit(".", 1))
        missing = () if only_in_training else (StoredSlice.at(full_name, shape),)
        stored = self.stored.get(full_name) or self.stored.get(under_adapter) or missing
        # A whole tensor must have the shape of the parameter, which is checked against the file.
        return tuple(StoredSlice.at(piece.name, shape) if piece.part.is_whole else piece for piece in stored)

    def is_surplus(self, stored: str) -> bool:
        """True: stored tensors such as optimizer state are rightly left unread."""
        return True


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def published(folder: Path) -> list[Path]:
    """Give the folder's checkpoints, oldest first, by name alone."""
    paths = (path for path in folder.glob(f"{_PREFIX}*") if path.name.removeprefix(_PREFIX).isdecimal())
    return sorted(filter(Path.is_dir, paths), key=step_of)


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(_PREFIX))


def write_manifest(info: CheckpointInfo) -> None:
    """Write the manifest into `info.path`, through to the disk."""
    content: dict[str, Any] = {
        "format": _FORMAT,
        "step": info.step,
        "identity": info.identity,
        "extras": info.rank_values,
        "tensors": {name: record.to_json() for name, record in info.tensors.items()},
        "files": info.files,
    }
    # Through JSON before hashing: the reader hashes what it has read.
    content = json.loads(json.dumps(content))
    content["sha256"] = _digest(content)
    write_durably(info.path / MANIFEST, json.dumps(content, indent=1))


def read_manifest(path: Path) -> CheckpointInfo:
    """Read the manifest of the checkpoint at `path`.

    Raises: DamagedCheckpoint when it is missing, cut short, altered, or of another format.
    """
    try:
        content = parse_json(read_bytes(path / MANIFEST))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"its {MANIFEST} is not of the format {_FORMAT!r}")
    if content.pop("sha256", None) != _digest(content):
        raise DamagedCheckpoint(f"its {MANIFEST} was altered: the checksum differs")
    try:
        info = CheckpointInfo(
            path,
            content["step"],
            dict(content["identity"]),
            tuple(content["extras"]),
            {name: TensorRecord.from_json(name, record) for name, record in content["tensors"].items()},
            {name: {key: record[key] for key in ("size_bytes", "sha256")} for name, record in content["files"].items()},
        )
        check_cover(info.tensors)
        if not isinstance(content["extras"], list):
            raise ValueError("its extras are no list")
        if path.name.startswith(_PREFIX) and path.name != folder_name(info.step):
            raise ValueError(f"it is that of step {info.step} in a folder of another name")
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise DamagedCheckpoint(f"its {MANIFEST} is no description of this checkpoint ({reason})") from None
    return info


def check_files(info: CheckpointInfo, part: int = 0, num_parts: int = 1) -> None:
    """Check the files against the manifest: all names and sizes, and the checksums of every `num_parts`-th one.

    Raises: DamagedCheckpoint naming the first file that is missing, not listed, cut short or altered.
    """
    present = {path.name for path in info.path.glob(f"*{TENSOR_SUFFIX}")}
    if strangers := sorted(present - info.files.keys()):
        raise DamagedCheckpoint(f"its {strangers[0]} is not in the manifest")
    for name, record in sorted(info.files.items()):
        if name not in present:
            raise DamagedCheckpoint(f"its {name} is missing")
        size_bytes = (info.path / name).stat().st_size
        if size_bytes != record["size_bytes"]:
            raise DamagedCheckpoint(f"its {name} has {size_bytes} bytes instead of {record['size_bytes']}")
    for name in sorted(info.files)[part::num_parts]:
        if describe_file(info.path / name) != info.files[name]:
            raise DamagedCheckpoint(f"its {name} was altered: the checksum differs")


def describe_file(path: Path) -> dict[str, Any]:
    """Read a file back and give its size and checksum."""
    with open_file(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size_bytes": file.tell(), "sha256": sha256}


def differing(identity: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """The differences between two identities, in words; settings that may change now are left out."""
    compared = {name: saved[name] for name in saved if name in identity or name not in MAY_CHANGE}
    return differences(identity, compared)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def warn_of_attributes(checkpoint: CheckpointInfo) -> None:
    """Warn in one line of layers' attributes in a checkpoint of an older version."""
    names = [record.of for record in checkpoint.tensors.values() if record.of.startswith(ATTRIBUTE)]
    if layers := sorted({".".join(name.split(".")[1:-1]) for name in names}):
        _logger.warning(
            "checkpoint %s holds attributes of %s, which are passed over; state is a buffer or get_extra_state",
            checkpoint.path,
            ", ".join(layers),
        )


# ---- The state of a process's random numbers, Python's and PyTorch's, as JSON values


def random_state() -> dict[str, Any]:
    """The state of this process's generators: Python's, PyTorch's, and that of the current CUDA device in use."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(numbers), gauss], "torch": _text(torch.get_rng_state())}
    if torch.cuda.is_initialized():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to `state`; a generator that it leaves out stays as it is."""
    if "python" in state:
        version, numbers, gauss = state["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "torch" in state:
        torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def restore_random_state(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
    """Set this rank's generators to the states that all ranks have `saved`, in rank order.

    With as many ranks as then, each takes its own. Otherwise each generator takes the state that all ranks had in
    common, and stays as it is if theirs differed.
    """
    common = {kind: state for kind, state in saved[0].items() if all(other.get(kind) == state for other in saved)}
    set_random_state(saved[rank] if len(saved) == world_size else common)


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

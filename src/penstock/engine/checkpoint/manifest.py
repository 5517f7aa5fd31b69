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
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.io.files import open_file, parse_json, read_bytes, write_durably
from penstock.model.hf.files import DTYPES, Names, WeightFiles, refuse_unfit_files
from penstock.parallel.tensor_slice import Shape, StoredSlice, TensorSlice
from penstock.settings.declare import check_kinds, match, mismatch
from penstock.settings.run import MAY_CHANGE

MANIFEST = "manifest.json"
OWNER_FILE = "run.json"
"""The file beside a run's checkpoints that says whose they are; it is there before the first step."""
TENSOR_SUFFIX = ".safetensors"
ATTRIBUTE = "attribute"
"""Begins the names of what older checkpoints hold of layers' attributes, which are no state any more."""
_FORMAT = "penstock-checkpoint-1"
_PREFIX = "step-"
_KINDS: dict[str, type] = {"step": int, "identity": dict, "extras": list, "tensors": dict, "files": dict}


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, on this rank or another; the ones before it are as they were.

    >>> raise CheckpointError("step 7 could not be saved: rank 1: runs/demo: no space left")
    Traceback (most recent call last):
    penstock.engine.checkpoint.manifest.CheckpointError: step 7 could not be saved: rank 1: runs/demo: no space left
    """


class DamagedCheckpoint(ValueError):
    """A checkpoint's files are not what its manifest says."""


@dataclass(frozen=True)
class TensorRecord:
    """One stored tensor."""

    #: the name of the tensor of which it is a slice, or all
    of: str
    #: its elements of that tensor
    part: TensorSlice
    #: in torch's words: ``float32``
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
        shape = _sizes(content["shape"])
        if "of" not in content:
            return cls(name, TensorSlice.whole(shape), str(content["dtype"]))
        part = TensorSlice(_sizes(content["start"]), shape, _sizes(content["of_shape"]))
        if not len(part.start) == len(shape) == len(part.full_shape) or any(
            first + size > end for first, size, end in zip(part.start, shape, part.full_shape, strict=True)
        ):
            raise ValueError(f"{name} begins at {part.start}, and is {shape} of {part.full_shape}")
        return cls(str(content["of"]), part, str(content["dtype"]))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r} is no shape")
    return tuple(values)


def check_cover(records: Mapping[str, TensorRecord]) -> None:
    """Refuse slices that do not make up their wholes. Raises: ValueError naming one."""
    counts: dict[tuple[str, Shape], int] = {}
    for record in records.values():
        key = record.of, record.part.full_shape
        counts[key] = counts.get(key, 0) + record.part.num_elements
    for (name, shape), count in counts.items():
        if count != math.prod(shape):
            raise ValueError(f"the ranks hold {count} elements of {name}, which has {math.prod(shape)}, {list(shape)}")


FileRecord = dict[str, Any]
"""Size and SHA-256 of one file: the values of `_FILE_KINDS`."""

_FILE_KINDS: dict[str, type] = {"size_bytes": int, "sha256": str}


@dataclass(frozen=True)
class CheckpointInfo(Names):
    """One published checkpoint. As a model's names it gives tensors whole, or in the slices that ranks had."""

    path: Path
    #: optimizer steps taken before it
    step: int
    #: the settings that make the run what it is
    identity: Mapping[str, Any]
    #: each rank's JSON value, in rank order
    rank_values: tuple[Any, ...]
    #: stored name -> the tensor
    tensors: Mapping[str, TensorRecord]
    #: file name -> the file
    files: Mapping[str, FileRecord]

    @property
    def extra(self) -> Any:
        """Rank 0's JSON value."""
        return self.rank_values[0]

    @cached_property
    def stored(self) -> dict[str, tuple[StoredSlice, ...]]:
        """The stored slices of each tensor, by the tensor's name."""
        found: dict[str, tuple[StoredSlice, ...]] = {}
        for name, record in self.tensors.items():
            found[record.of] = (*found.get(record.of, ()), StoredSlice(name, record.part))
        return found

    @property
    def vocab_size(self) -> int:
        """The number of rows of a decoder's embedding. Raises: ValueError if the checkpoint has none."""
        embedding = self.stored.get("embedding.weight")
        if embedding is None or len(embedding[0].part.full_shape) != 2:
            raise ValueError(f"checkpoint {self.path} holds no embedding.weight of tokens and sizes")
        return embedding[0].part.full_shape[0]

    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]:
        """As of all names; none for a parameter that only training uses and this run did not."""
        only_in_training = ".balance." in full_name or ".predictions." in full_name
        under_adapter = ".base_layer.".join(full_name.rsplit(".", 1))
        missing = () if only_in_training else (StoredSlice.at(full_name, shape),)
        stored = self.stored.get(full_name) or self.stored.get(under_adapter) or missing
        # A whole tensor must have the shape of the parameter, which is checked against the file.
        return tuple(StoredSlice.at(found.name, shape) if found.part.is_whole else found for found in stored)

    def is_surplus(self, stored: str) -> bool:
        """True: stored tensors such as optimizer state are rightly left unread."""
        return True


def folder_name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def published(folder: Path) -> list[Path]:
    """Give the folder's checkpoints, oldest first, by name alone."""
    found = {
        int(path.name.removeprefix(_PREFIX)): path
        for path in folder.glob(f"{_PREFIX}*")
        if path.name.removeprefix(_PREFIX).isdecimal() and path.is_dir()
    }
    return [found[step] for step in sorted(found)]


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

    Raises: DamagedCheckpoint when it is missing, cut short, altered, or of another format, or when the checkpoint has a
    link out of its folder.
    """
    try:
        refuse_unfit_files(path)
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(str(error)) from None
    try:
        content = parse_json(read_bytes(path / MANIFEST))
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"its {MANIFEST} cannot be read ({error})") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DamagedCheckpoint(f"its {MANIFEST} is not of the format {_FORMAT!r}")
    if content.pop("sha256", None) != _digest(content):
        raise DamagedCheckpoint(f"its {MANIFEST} was altered: the checksum differs")
    try:
        check_kinds(content, _KINDS, MANIFEST)
        if lacking := [key for key in _KINDS if content.get(key) is None]:
            raise ValueError(f"it lacks {lacking[0]}")
        if not content["extras"]:
            raise ValueError("it has values of no rank")
        info = CheckpointInfo(
            path,
            content["step"],
            content["identity"],
            tuple(content["extras"]),
            {name: TensorRecord.from_json(name, record) for name, record in content["tensors"].items()},
            content["files"],
        )
        for name, record in info.files.items():
            if not isinstance(record, dict) or record.keys() != _FILE_KINDS.keys():
                raise ValueError(f"files: {name} has not {' and '.join(_FILE_KINDS)}")
            check_kinds(record, _FILE_KINDS, name)
        check_cover(info.tensors)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = error if isinstance(error, ValueError) else repr(error)
        raise DamagedCheckpoint(f"its {MANIFEST} is no description of a checkpoint ({reason})") from None
    try:
        check_rank_values(info.rank_values, info.step)
    except ValueError as error:
        raise DamagedCheckpoint(f"its {MANIFEST} has values that no run had: {error}") from None
    if path.name.startswith(_PREFIX) and path.name != folder_name(info.step):
        raise DamagedCheckpoint(f"it is that of step {info.step} in a folder of another name")
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


def describe_file(path: Path) -> FileRecord:
    """Read a file back and give its size and checksum."""
    with open_file(path) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"size_bytes": file.tell(), "sha256": sha256}


def differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Sequence[str]:
    """Say in which settings two identities differ."""
    return [
        f"{key} is {theirs.get(key)!r} there and {ours.get(key)!r} here"
        # An earlier version may have compared more.
        for key in sorted(ours.keys() | (theirs.keys() - MAY_CHANGE))
        if ours.get(key) != theirs.get(key)
    ]


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


# ---- The checks by which a checkpoint counts as intact; one that is not is passed over, and said to be


_logger = logging.getLogger(__name__)


def examine(path: Path, identity: Mapping[str, Any] | None = None, part: int = 0, num_parts: int = 1) -> CheckpointInfo:
    """The checkpoint at `path`, once it has been found intact.

    Of `num_parts` processes that examine it together, each reads its part of the files. identity: that of the run whose
    it must be; None takes that of any.

    Raises: DamagedCheckpoint.
    """
    try:
        info = read_manifest(path)
        if identity is not None and (changed := differing(identity, info.identity)):
            raise DamagedCheckpoint(f"it is of another run: {changed[0]}")
        check_files(info, part, num_parts)
        if part == 0:
            check_headers(info)
    except OSError as error:
        raise DamagedCheckpoint(str(error)) from None
    return info


def check_headers(info: CheckpointInfo) -> None:
    """Compare the headers of all files with the manifest: each tensor is there once, of its dtype and shape.

    Raises: DamagedCheckpoint naming a tensor.
    """
    file_of: dict[str, str] = {}
    for name in sorted(info.files):
        try:
            headers = WeightFiles.of_files(info.path, [name]).tensors
        except ValueError as error:
            raise DamagedCheckpoint(str(error)) from None
        for tensor, stored in headers.items():
            found = f"{list(stored.shape)} of {str(DTYPES.get(stored.dtype, stored.dtype)).removeprefix('torch.')}"
            if tensor not in info.tensors:
                raise DamagedCheckpoint(f"its {name} holds {tensor}, which is not in the manifest")
            if found != str(info.tensors[tensor]):
                raise DamagedCheckpoint(f"its {name} holds {tensor} as {found} instead of {info.tensors[tensor]}")
            if tensor in file_of:
                raise DamagedCheckpoint(f"its {name} and {file_of[tensor]} both hold {tensor}")
            file_of[tensor] = name
    if missing := sorted(info.tensors.keys() - file_of.keys()):
        raise DamagedCheckpoint(f"none of its files holds {missing[0]}")


def newest_intact(folder: Path, identity: Mapping[str, Any], quiet: bool = False) -> CheckpointInfo:
    """Find the newest intact checkpoint in the folder, alone; damaged ones are warned of unless `quiet`.

    Raises: DamagedCheckpoint where there is none.
    """
    refused = ""
    for path in reversed(published(folder)):
        try:
            return examine(path, identity)
        except DamagedCheckpoint as error:
            refused = refused or f"; {path.name} is damaged: {error}"
            if not quiet:
                warn_of(path, str(error))
    raise DamagedCheckpoint(f"{folder} holds no intact checkpoint{refused}")


def warn_of(path: Path, reason: str) -> None:
    """Say that a checkpoint is passed over, and why."""
    _logger.warning("checkpoint %s is refused: %s", path, reason)


def warn_of_attributes(checkpoint: CheckpointInfo) -> None:
    """Say in one line which attributes of layers a checkpoint of an older version holds, if any."""
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
    """Go on with the random numbers of `state`; a generator that it leaves out stays as it is.

    Raises:
        ValueError: it is no state that `random_state` gave.
    """
    _put(state, random.setstate, torch.set_rng_state, torch.cuda.set_rng_state if torch.cuda.is_available() else None)


def _put(
    state: Mapping[str, Any],
    python: Callable[[Any], object],
    cpu: Callable[[Tensor], object],
    cuda: Callable[[Tensor], object] | None = None,
) -> None:
    try:
        if "python" in state:
            version, numbers, gauss = state["python"]
            python((version, tuple(numbers), None if gauss is None else float(gauss)))
        if "torch" in state:
            cpu(_tensor(state["torch"]))
        if "cuda" in state:
            values = _tensor(state["cuda"])
            if cuda is not None:
                cuda(values)
    except (ValueError, TypeError, OverflowError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the saved state of random numbers is none ({type(error).__name__}: {reason})") from None


def restore_random_state(saved: Sequence[Mapping[str, Any]], rank: int, world_size: int) -> None:
    """Go on with the states that all ranks have `saved`, in rank order.

    As many ranks as then take their own. Any other number of ranks take, generator by generator, the state that all had
    in common; where each had its own, it belongs to the old layout, and nothing is changed.
    """
    if len(saved) == world_size:
        set_random_state(saved[rank])
    else:
        first = saved[0].items()
        set_random_state({kind: own for kind, own in first if all(theirs.get(kind) == own for theirs in saved)})


def _text(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


# ---- The fields of what a rank saves beside its tensors, checked where a manifest is read


# An engine's values have the key ``engine``, and those of a run more keys. All else that a checkpoint holds of a rank
# is its user's own, and may be any JSON value.
_FIELDS: dict[str, Any] = {
    "engine": dict,
    "engine.step": int,
    "engine.optimizer": dict,
    "engine.optimizer.num_steps": int,
    "engine.optimizer.num_updates": int,
    "engine.optimizer.learning_rate": float,
    "engine.optimizer.scaler": dict | None,
    "engine.optimizer.scaler.scale": float,
    "engine.optimizer.scaler.num_good_steps": int,
    "engine.optimizer.since": dict,
    "engine.optimizer.since.*": int,
    "engine.optimizer.kinds": str,
    "engine.optimizer.paused": dict,
    "engine.optimizer.paused.*": int,
    "random": dict,
    "loader": dict,
    "loader.epoch": int,
    "loader.position": int,
    "loader.seed": int,
    "loader.fingerprint": str,
    "early_stop": dict | None,
    "early_stop.best": float | None,
    "early_stop.num_worse": int,
}
_MAY_LACK = ("engine.optimizer.since", "engine.optimizer.paused", "engine.optimizer.kinds", "loader", "early_stop")
_SAME_ON_ALL_RANKS = ("engine", "loader", "early_stop")


def check_rank_values(values: Sequence[Any], step: int) -> None:
    """Check each rank's values of a checkpoint of that step, where they are an engine's.

    Raises: ValueError naming a field that is missing or of another kind, or that cannot be with the others.
    """
    engines = [isinstance(theirs, dict) and "engine" in theirs for theirs in values]
    if not any(engines):
        return
    if not all(engines):
        raise ValueError(f"rank {engines.index(False)} has no values of an engine, and rank {engines.index(True)} has")
    for rank, theirs in enumerate(values):
        try:
            _check_fields(theirs)
            # Would `set_random_state` take it? Nothing is changed.
            _put(theirs["random"], random.Random().setstate, torch.Generator().set_state)
        except ValueError as error:
            raise ValueError(f"of rank {rank}, {error}") from None
        if differing := [key for key in _SAME_ON_ALL_RANKS if theirs.get(key) != values[0].get(key)]:
            raise ValueError(f"ranks 0 and {rank} have not the same {differing[0]}")
    # Updates may outnumber steps: a caller may give several steps the same number.
    engine = values[0]["engine"]
    num_steps = engine["optimizer"]["num_steps"]
    if not num_steps == engine["step"] == step:
        raise ValueError(
            f"step {engine['step']} of the engine and {num_steps} of the optimizer are not {step}, the checkpoint's"
        )


def _check_fields(values: Mapping[str, Any]) -> None:
    for path, kind in _FIELDS.items():
        *around, key = path.split(".")
        owner: Any = values
        for word in around:
            owner = owner and owner.get(word)
        if owner is None:
            continue
        for name in owner if key == "*" else [key]:
            place = ".".join([*around, name])
            if name not in owner:
                if path in _MAY_LACK:
                    continue
                raise ValueError(f"{place} is missing")
            fits, number = match(kind, owner[name])
            if not fits:
                raise ValueError(mismatch(place, owner[name], kind))
            is_count = kind is int and path != "loader.seed"
            if (is_count and not 0 <= number < 2**63) or (isinstance(number, float) and not math.isfinite(number)):
                raise ValueError(f"{place} = {reprlib.repr(owner[name])} is not possible; no run counts so")

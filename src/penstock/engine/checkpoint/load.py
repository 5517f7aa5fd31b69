"""Loading: the newest intact checkpoint of a run, read by any layout.

A checkpoint stores tensors as the ranks had them, whole or in slices. A rank takes from each stored slice what that has
in common with its own, straight from the file. So any layout reads what any other has saved, and memory never holds
more than the rank's own tensors and one stored slice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.checkpoint.manifest import (
    MANIFEST,
    TENSOR_SUFFIX,
    CheckpointError,
    CheckpointInfo,
    DamagedCheckpoint,
    check_files,
    differing,
    published,
    read_manifest,
)
from penstock.model.hf.files import DTYPES, WeightFiles
from penstock.parallel import Grid
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.tensor_slice import Indices, LocalTensor, StoredSlice, copies, local_slices

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


# ---- Loading: the newest intact checkpoint of a run, read by any layout


T = TypeVar("T")


class CheckpointReader:
    """Loads the checkpoints of one run from its folder, to which another process may be writing.

    Every rank of the grid makes one and calls alike.

    The folder may also be a single checkpoint. identity: the settings that make this run what it is, as a flat JSON
    mapping; None reads those of any run. aliases: names of tensors that are
    equal to another by construction (tied copies and their optimizer state) -> that other's name, under which alone
    they are stored.
    """

    #: the folder of the checkpoints, each a folder of its own
    folder: Path
    #: damaged checkpoint -> what is wrong with it
    refused: dict[Path, str]
    #: this rank's place, and its groups
    _grid: Grid
    #: gathers each rank's JSON value
    _gather: Callable[[Any], list[Any]]
    #: the settings that make this run what it is, as JSON gives them back; None to read any run
    _identity: Any
    #: name of a tensor -> the name under which alone it is stored
    _aliases: dict[str, str]

    def __init__(
        self,
        folder: Path | str,
        grid: Grid,
        identity: Mapping[str, Any] | None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.refused, self._grid = Path(folder), {}, grid
        self._gather = partial(gather_json, group=grid.control)
        self._identity = json.loads(json.dumps(identity))
        self._aliases = dict(aliases or {})

    def latest(self) -> CheckpointInfo | None:
        """Find the newest checkpoint that is intact; damaged ones are warned of by name and entered in `refused`.

        Each rank verifies some of the files, and all return the same.
        """
        rank, num_ranks = self._grid.rank, self._grid.world_size

        def names() -> list[str]:
            if rank > 0:
                return []
            # Oldest first; of a folder that is a checkpoint itself, that one.
            return ["."] if (self.folder / MANIFEST).is_file() else [path.name for path in published(self.folder)]

        found = on_all_ranks(names, self._gather, ValueError, otherwise=CheckpointError)
        for name in reversed(self._gather(found)[0]):
            path, info, reason = self.folder / name, None, None
            try:
                info = examine(path, self._identity, rank, num_ranks)
            except DamagedCheckpoint as error:
                reason = str(error)
            reasons = [theirs for theirs in self._gather(reason) if theirs is not None]
            if not reasons:
                return info
            self.refused[path] = reasons[0]
            if rank == 0:
                warn_of(path, reasons[0])
        return None

    def existing(self) -> CheckpointInfo:
        """Find the newest checkpoint that is intact, of which there must be one.

        Raises: FileNotFoundError where there is none at all, DamagedCheckpoint where none is intact; on all ranks.
        """
        info = self.latest()
        if info is not None:
            return info
        if self.refused:
            path, reason = next(iter(self.refused.items()))
            raise DamagedCheckpoint(f"no checkpoint in {self.folder} can be read: {path} is refused, {reason}")
        raise FileNotFoundError(f"{self.folder} holds no checkpoint")

    def check_used(self, info: CheckpointInfo, tensors: Mapping[str, LocalTensor], ignored: str = "") -> None:
        """Refuse a checkpoint with tensors that no rank asks for, but for names that begin with `ignored`.

        Raises: ValueError naming some of them, on all ranks alike.
        """
        asked = self._gather(sorted({self._aliases.get(name, name) for name in tensors}))
        unused = sorted(info.stored.keys() - {name for names in asked for name in names})
        unused = [name for name in unused if not (ignored and name.startswith(ignored))]
        if unused:
            raise ValueError(f"checkpoint {info.path} holds {len(unused)} tensors that the model lacks: {unused[:3]}")

    def load(self, info: CheckpointInfo, tensors: Mapping[str, LocalTensor]) -> None:
        """Copy stored values into this rank's tensors, by name and in place; nothing else is read.

        Raises: FileNotFoundError with the path of a file that is gone; ValueError for a tensor that is not stored,
        or stored in another shape. Every rank raises when one does.
        """
        on_all_ranks(
            lambda: self._load(info, tensors),
            self._gather,
            ValueError,
            FileNotFoundError,
            otherwise=CheckpointError,
        )

    def restore(self, info: CheckpointInfo, act: Callable[[Any], T]) -> T:
        """Act on the JSON value that this rank saved; of another number of ranks, on rank 0's, which all can take.

        Raises: DamagedCheckpoint where the act finds that value to be another than was ever saved, and the act's own
        ValueError; on all ranks alike.
        """
        rank = self._grid.rank if len(info.rank_values) == self._grid.world_size else 0

        def restored() -> T:
            try:
                return act(info.rank_values[rank])
            except (KeyError, IndexError, TypeError, AttributeError, RuntimeError) as error:
                raise DamagedCheckpoint(
                    f"checkpoint {info.path}: the values of rank {rank} are none of a run ({error!r})"
                ) from error

        return on_all_ranks(restored, self._gather, ValueError, otherwise=CheckpointError, message="{error}")

    def _load(self, info: CheckpointInfo, tensors: Mapping[str, LocalTensor]) -> None:
        sources = {name: self._aliases.get(name, name) for name in tensors}
        stored = info.stored
        missing = sorted(name for name, source in sources.items() if source not in stored)
        if missing:
            raise ValueError(f"checkpoint {info.path} lacks {len(missing)} of the tensors asked for: {missing[:3]}")
        wanted: dict[str, list[tuple[Indices, Tensor]]] = {}
        for name, source in sources.items():
            for name_in_file, indices, into in _copies(info, name, stored[source], tensors[name]):
                wanted.setdefault(name_in_file, []).append((indices, into))
        for file in info.files:
            if not (info.path / file).exists():
                raise FileNotFoundError(f"checkpoint file {info.path / file} is missing")
        unread = set(wanted)
        for path in sorted(info.path.glob(f"*{TENSOR_SUFFIX}")):
            unread -= _read_file(path, wanted)
        if unread:
            raise DamagedCheckpoint(f"checkpoint {info.path}: none of its files holds {min(unread)}")


def _copies(
    info: CheckpointInfo, name: str, stored: Sequence[StoredSlice], local: LocalTensor
) -> list[tuple[str, Indices, Tensor]]:
    """All that must be copied into a rank's tensor.

    Raises: ValueError where it is stored in another shape, or not all of it, or as whole numbers where fractions belong
    or the other way round; precisions may differ.
    """
    every, full_shape = [], stored[0].part.full_shape
    for own, values in local_slices(local).items():
        if own.full_shape != full_shape:
            raise ValueError(f"{name} has the shape {own.full_shape}, but checkpoint {info.path} holds {full_shape}")
        for record in (info.tensors[one.name] for one in stored):
            if getattr(torch, record.dtype).is_floating_point != values.is_floating_point():
                raise ValueError(f"{name} is of {values.dtype}, but checkpoint {info.path} holds {record}")
        found = list(copies(stored, own, values))
        num_found = sum(into.numel() for _, _, into in found)
        if num_found != values.numel():
            raise ValueError(
                f"checkpoint {info.path} holds {num_found} of the {values.numel()} elements of {name}{own}"
            )
        every += found
    return every


def _read_file(path: Path, wanted: Mapping[str, Sequence[tuple[Indices, Tensor]]]) -> set[str]:
    """Copy what is wanted of a file, one stretch at a time; returns the names of the tensors that it has had."""
    try:
        with safe_open(path, framework="pt") as file:
            found = wanted.keys() & file.keys()
            for name in sorted(found):
                for indices, into in wanted[name]:
                    into.copy_(take(file, name, indices))
            return found
    except SafetensorError as error:
        raise DamagedCheckpoint(f"{path} is no safetensors file ({error})") from None


def take(file: Any, name: str, indices: Indices) -> Tensor:
    """Part of a tensor of an open file; nothing else is read."""
    return file.get_slice(name)[indices] if indices else file.get_tensor(name)

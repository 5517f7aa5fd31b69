"""Checkpoints that any layout can read, written beside training and published whole or not at all.

How a save survives a kill at any moment, of any rank: all ranks write into one hidden folder; when each has told the
others the checksums of what it wrote, rank 0 adds the manifest and renames the folder to its final name. Only that
rename publishes. What hidden folders a killed run leaves, the next one clears away.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.manifest import (
    CheckpointError,
    CheckpointInfo,
    DamagedCheckpoint,
    FileRecord,
    TensorRecord,
    check_files,
    describe_file,
    differences,
    folder_name,
    published,
    read_manifest,
    step_of,
    sync_folder,
    write_durably,
    write_manifest,
)
from penstock.engine.stored import Stored, check_cover, to_store
from penstock.parallel.host import gather_json, on_all_ranks
from penstock.parallel.layout import Grid
from penstock.parallel.parts import Held, parts_of

_RUN_FILE = "run.json"
_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
# The safetensors library writes a file in one call that holds the interpreter: some 10 ms at this size, during which
# training can not launch anything. Large states get larger files, so that their number stays sensible.
_FILE_BYTES = 16 * 2**20
_MAX_FILES = 64

WriteTensors = Callable[[Path, Mapping[str, Tensor], dict[str, int]], list[str]]
"""Files of these tensors, each with the number of its file, in a folder; see `write_tensors`."""

_logger = logging.getLogger(__name__)


class AnotherRun(ValueError):
    """The folder holds checkpoints of a run with other settings."""


class Checkpointer:
    """Saves and loads the checkpoints of one run in one folder; every rank of the grid makes one and calls alike.

    identity: the settings that make this run what it is, as a flat JSON mapping. keep: how many of the newest
    checkpoints stay. aliases: names of tensors that are equal to another by construction (tied copies and their
    optimizer state) -> that other's name; they are not saved, and loaded from the other. claim: take the folder for
    this run, which then writes there; without it the folder is only read, and another run may be writing.

    Where several ranks hold a tensor of one name (data parallel), one of them saves it, in turn.

    Raises: AnotherRun on every rank when the folder belongs to a run of another identity; ValueError.
    """

    def __init__(
        self,
        folder: Path | str,
        grid: Grid,
        identity: Mapping[str, Any],
        keep: int = 3,
        aliases: Mapping[str, str] | None = None,
        claim: bool = True,
    ) -> None:
        if keep < 1:
            raise ValueError(f"at least 1 checkpoint must be kept, not {keep}")
        self.folder = Path(folder)
        self.refused: dict[Path, str] = {}
        self._grid = grid
        self._identity = json.loads(json.dumps(identity))
        self._keep = keep
        self._aliases = dict(aliases or {})
        self._host_copies: dict[str, Tensor] = {}
        self._writer: _Writer | None = None
        self._write_tensors: WriteTensors | None = None
        if claim:
            from penstock.engine.tensor_writer import write_tensors

            self._write_tensors = write_tensors
        self._together(self._open if claim and grid.rank == 0 else lambda: None)

    def latest(self) -> CheckpointInfo | None:
        """Find the newest checkpoint that is intact; damaged ones are warned of by name and entered in `refused`.

        Every rank reads through its share of the files, and all give the same answer.
        """
        names = [path.name for path in published(self.folder)] if self._grid.rank == 0 else None
        for name in reversed(gather_json(names, self._grid.control)[0]):
            path = self.folder / name
            info, reason = self._examine(path)
            reasons = [told for told in gather_json(reason, self._grid.control) if told is not None]
            if not reasons:
                return info
            self.refused[path] = reasons[0]
            if self._grid.rank == 0:
                _logger.warning("checkpoint %s is refused: %s", path, reasons[0])
        return None

    def load(self, info: CheckpointInfo, tensors: Mapping[str, Held]) -> None:
        """Copy stored values into what this rank holds, by name and in place; only what is asked for is read.

        Beside what is held there is never more in memory than one stored tensor.

        Raises: FileNotFoundError with the path of a file that is gone; ValueError for a tensor that is not stored,
        or stored in another shape. Every rank raises when one does.
        """
        self._together(lambda: self._load(info, tensors))

    def save(self, step: int, tensors: Mapping[str, Held], extra: Any = None, wait: bool = False) -> None:
        """Copy what this rank holds to host memory and write it while training goes on; `extra` is its own, for JSON.

        A save before this one is finished first. With `wait` this one is, too.

        Raises: CheckpointError, for the save before this one; ValueError where ranks disagree on the step or on the
        shape of a tensor, or hold parts that do not make up a whole.
        """
        self.finish()
        staging = self.folder / f"{_SAVING}{folder_name(step)}"
        texts: list[str] = []

        def prepare() -> None:
            # As text at once: the caller may change what it has given while the writer runs.
            texts.append(json.dumps(extra))
            if self._grid.rank == 0:
                shutil.rmtree(staging, ignore_errors=True)
                staging.mkdir()

        self._together(prepare)
        own = to_store({name: held for name, held in tensors.items() if name not in self._aliases})
        plan = _plan_save(step, own, self._grid)
        copies = {name: self._copy_to_host(name, own[name][0]) for name in plan.names_of(self._grid.rank)}
        self._writer = _Writer(lambda: self._write(staging, step, copies, plan, json.loads(texts[0])))
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way is published.

        Raises: CheckpointError when it failed, on this rank or another.
        """
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.join()

    def _open(self) -> None:
        """Claim the folder for this run and clear away what a killed one left; rank 0."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run_file = self.folder / _RUN_FILE
        if run_file.exists():
            try:
                theirs = json.loads(run_file.read_text(encoding="utf-8"))["identity"]
            except (ValueError, KeyError, TypeError):
                raise AnotherRun(f"{run_file} can not be read; give another folder") from None
            if changed := differences(self._identity, theirs):
                raise AnotherRun(f"{self.folder} holds another run: {'; '.join(changed[:5])}; give another folder")
        else:
            write_durably(run_file, json.dumps({"identity": self._identity}, indent=1))
        for path in self.folder.glob(f"{_REPLACED}*"):
            # Killed between two renames: the old one is still the published one.
            original = self.folder / path.name.removeprefix(_REPLACED)
            if not original.exists():
                path.rename(original)
        for prefix in (_SAVING, _REPLACED, _DELETING):
            for path in self.folder.glob(f"{prefix}*"):
                shutil.rmtree(path)

    def _examine(self, path: Path) -> tuple[CheckpointInfo | None, str | None]:
        try:
            info = read_manifest(path)
            if changed := differences(self._identity, info.identity):
                raise DamagedCheckpoint(f"it is of another run: {changed[0]}")
            check_files(info, self._grid.rank, self._grid.world_size)
        except (DamagedCheckpoint, OSError) as error:
            return None, str(error)
        return info, None

    def _load(self, info: CheckpointInfo, tensors: Mapping[str, Held]) -> None:
        stored = Stored(info)
        stored_names = {name: self._aliases.get(name, name) for name in tensors}
        missing = sorted(name for name, of in stored_names.items() if of not in stored)
        if missing:
            raise ValueError(f"checkpoint {info.path} lacks {len(missing)} of the tensors asked for: {missing[:3]}")
        for name, of in stored_names.items():
            for part in parts_of(tensors[name]):
                if part.full_shape != stored.shape(of):
                    raise ValueError(
                        f"{name} has the shape {part.full_shape}, but checkpoint {info.path} holds {stored.shape(of)}"
                    )
        for file in info.files:
            if not (info.path / file).exists():
                raise FileNotFoundError(f"checkpoint file {info.path / file} is missing")
        stored.read([c for name, of in stored_names.items() for c in stored.copies(of, tensors[name])])

    def _copy_to_host(self, name: str, tensor: Tensor) -> Tensor:
        """Copy into host memory kept from save to save: fresh pages cost several times the copy itself."""
        buffer = self._host_copies.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host_copies[name] = buffer
        return buffer.copy_(tensor.detach())

    def _write(self, staging: Path, step: int, copies: Mapping[str, Tensor], plan: _SavePlan, extra: Any) -> None:
        """Write this rank's share and, when all have, publish; runs in the background on every rank."""
        files, error = {}, None
        assert self._write_tensors is not None, "a folder that was not claimed is only read"
        try:
            names = self._write_tensors(staging, copies, plan.file_of)
            files = {name: asdict(describe_file(staging / name)) for name in names}
        except Exception as caught:
            error = f"{type(caught).__name__}: {caught}"
        # This gathering is also the barrier: rank 0 publishes when every rank's files are on the disk.
        reports = gather_json({"files": files, "extra": extra, "error": error}, self._grid.background)
        _raise_first(step, [report["error"] for report in reports])
        if self._grid.rank == 0:
            try:
                self._publish(staging, step, plan, reports)
            except Exception as caught:
                error = f"{type(caught).__name__}: {caught}"
        _raise_first(step, gather_json(error, self._grid.background))

    def _publish(self, staging: Path, step: int, plan: _SavePlan, reports: list[dict[str, Any]]) -> None:
        files = {name: FileRecord(**record) for report in reports for name, record in report["files"].items()}
        extras = tuple(report["extra"] for report in reports)
        write_manifest(CheckpointInfo(staging, step, self._identity, extras, plan.tensors, files))
        target = self.folder / folder_name(step)
        if target.exists():
            target.rename(self.folder / f"{_REPLACED}{target.name}")
        staging.rename(target)
        sync_folder(self.folder)
        self.refused.pop(target, None)
        shutil.rmtree(self.folder / f"{_REPLACED}{target.name}", ignore_errors=True)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Delete all but the newest intact checkpoints up to this step, and damaged ones older than those."""
        older = [path for path in published(self.folder) if step_of(path) <= step]
        intact = [path for path in older if path not in self.refused]
        oldest_kept = step_of(intact[-self._keep :][0])
        for path in older:
            if step_of(path) < oldest_kept:
                # Under its own name it would be a damaged checkpoint as soon as the first file is gone.
                shutil.rmtree(path.rename(self.folder / f"{_DELETING}{path.name}"), ignore_errors=True)

    def _together(self, act: Callable[[], None]) -> None:
        gather = partial(gather_json, group=self._grid.control)
        on_all_ranks(act, gather, AnotherRun, ValueError, FileNotFoundError, otherwise=CheckpointError)


class _Writer:
    """A thread whose exception comes out where it is joined; it never keeps the process from ending."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="checkpoint writer", daemon=True)
        self._thread.start()

    def join(self) -> None:
        self._thread.join()
        if self._error is not None:
            raise CheckpointError(str(self._error)) from self._error

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._error = error


@dataclass(frozen=True)
class _SavePlan:
    """Which rank writes each tensor, into which file (numbered from 1 over all ranks); the same on every rank."""

    tensors: Mapping[str, TensorRecord]
    writer_of: Mapping[str, int]
    file_of: dict[str, int]

    def names_of(self, rank: int) -> list[str]:
        return [name for name, writer in self.writer_of.items() if writer == rank]


def _plan_save(step: int, own: Mapping[str, tuple[Tensor, TensorRecord]], grid: Grid) -> _SavePlan:
    """Divide all ranks' tensors among those that hold them, by bytes.

    Raises: ValueError on every rank when ranks disagree on the step, or on a tensor's shape or type, or hold parts
    that do not make up a whole.
    """
    described = {name: [record.to_json(), tensor.nbytes] for name, (tensor, record) in own.items()}
    by_rank = gather_json({"step": step, "tensors": described}, grid.control)
    if len({told["step"] for told in by_rank}) > 1:
        raise ValueError(f"ranks save different steps: {[told['step'] for told in by_rank]}")
    holders: dict[str, list[int]] = {}
    sizes_bytes: dict[str, int] = {}
    tensors: dict[str, TensorRecord] = {}
    for rank, told in enumerate(by_rank):
        for name, (json_record, size_bytes) in sorted(told["tensors"].items()):
            record = TensorRecord.from_json(json_record)
            if tensors.setdefault(name, record) != record:
                raise ValueError(f"{name} is {tensors[name]} on rank {holders[name][0]} and {record} on rank {rank}")
            sizes_bytes[name] = size_bytes
            holders.setdefault(name, []).append(rank)
    check_cover(tensors)
    loads_bytes = [0] * len(by_rank)
    writer_of: dict[str, int] = {}
    # Those without a choice first, then large before small.
    for name in sorted(tensors, key=lambda name: (len(holders[name]) > 1, -sizes_bytes[name], name)):
        writer_of[name] = min(holders[name], key=lambda rank: (loads_bytes[rank], rank))
        loads_bytes[writer_of[name]] += sizes_bytes[name]
    file_of = _cut_into_files(sizes_bytes, writer_of, loads_bytes)
    return _SavePlan(dict(sorted(tensors.items())), writer_of, file_of)


def _cut_into_files(
    sizes_bytes: Mapping[str, int], writer_of: Mapping[str, int], loads_bytes: list[int]
) -> dict[str, int]:
    """Number the files of all ranks from 1, and give each tensor's."""
    file_of: dict[str, int] = {}
    num_files = 0
    for rank, load_bytes in enumerate(loads_bytes):
        cap_bytes, held_bytes = max(_FILE_BYTES, load_bytes // _MAX_FILES), None
        for name in sorted(name for name, writer in writer_of.items() if writer == rank):
            if held_bytes is None or held_bytes + sizes_bytes[name] > cap_bytes:
                num_files, held_bytes = num_files + 1, 0
            held_bytes += sizes_bytes[name]
            file_of[name] = num_files
    return file_of


def _raise_first(step: int, errors: list[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise CheckpointError(f"step {step} could not be saved: rank {rank}: {error}")

"""A run's checkpoints: saved beside training and published whole or not at all, and read by any layout.

A checkpoint stores tensors as the ranks had them, whole or in slices. A rank takes from each stored slice what that has
in common with its own, straight from the file. So any layout reads what any other has saved, and memory never holds
more than the rank's own tensors and one stored slice.

A save survives a kill of any rank at any moment: all ranks write into one hidden folder. When each has sent the
others the checksums of what it wrote, rank 0 adds the manifest and renames the folder to its final name. Only that
rename publishes. The hidden folders that a killed run leaves are cleared away by the next one.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from penstock.engine.checkpoint.manifest import (
    ATTRIBUTE,
    MANIFEST,
    OWNER_FILE,
    TENSOR_SUFFIX,
    CheckpointError,
    CheckpointInfo,
    DamagedCheckpoint,
    TensorRecord,
    check_cover,
    check_files,
    describe_file,
    differing,
    folder_name,
    published,
    read_manifest,
    step_of,
    write_manifest,
)
from penstock.engine.optimizer.state import STATE, is_of_all, state_name
from penstock.io.files import naming, read_json_object, remove, sync_folder, write_durably
from penstock.model.hf.files import MissingFile, refuse_unfit_files
from penstock.parallel import Grid
from penstock.parallel.host import gather_json, gather_on_all_ranks, on_all_ranks
from penstock.parallel.tensor_slice import Indices, LocalTensor, StoredSlice, copies, local_slices
from penstock.settings.declare import words_of

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
# The safetensors library writes a file in one call that holds the interpreter: some 10 ms at this size, during which
# training cannot launch anything. Large states get larger files, so that their number stays sensible.
_FILE_BYTES = 16 * 2**20
_MAX_FILES = 64

T = TypeVar("T")

_logger = logging.getLogger(__name__)


# ---- Loading


class CheckpointReader:
    """Loads the checkpoints of one run from its folder, to which another process may be writing.

    Every rank of the grid makes one and calls alike; without a grid the process is alone.
    """

    #: the folder of the checkpoints, each a folder of its own; or a single checkpoint
    folder: Path
    #: damaged checkpoint -> what is wrong with it
    refused: dict[Path, str]
    #: this rank's place in the grid, and the number of ranks there
    _rank: int
    _num_ranks: int
    #: the group of all ranks; None without others
    _control: dist.ProcessGroup | None
    #: the settings that make this run what it is, as JSON gives them back; None to read any run
    _identity: Any
    #: names of tensors that are equal to another by construction (tied copies) -> that other's name, under which alone
    #: they and their optimizer state are stored
    _aliases: dict[str, str]

    def __init__(
        self,
        folder: Path | str,
        grid: Grid | None,
        identity: Mapping[str, Any] | None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.refused = Path(folder), {}
        self._rank, self._num_ranks = (0, 1) if grid is None else (grid.rank, grid.world_size)
        self._control = None if grid is None else grid.control
        self._identity = json.loads(json.dumps(identity))
        self._aliases = dict(aliases or {})

    def latest(self, quiet: bool = False) -> CheckpointInfo | None:
        """Find the newest intact checkpoint; damaged ones are entered in `refused`, with a warning unless `quiet`.

        Each rank verifies some of the files, and all ranks get the same result.
        """

        def names() -> list[str]:
            # Oldest first; of a folder that is a checkpoint itself, that one.
            is_one = (self.folder / MANIFEST).is_file()
            return ["."] if is_one else [path.name for path in published(self.folder)]

        names_by_rank = gather_on_all_ranks(names, self._control, ValueError, otherwise=CheckpointError)
        for name in reversed(names_by_rank[0]):
            path, info, reason = self.folder / name, None, None
            try:
                refuse_unfit_files(path)
                info = read_manifest(path)
                if self._identity is not None and (changed := differing(self._identity, info.identity)):
                    raise DamagedCheckpoint(f"it is of another run: {changed[0]}")
                check_files(info, self._rank, self._num_ranks)
            except (ValueError, OSError) as error:
                reason = str(error)
            reasons = [other for other in gather_json(reason, self._control) if other is not None]
            if not reasons:
                return info
            self.refused[path] = reasons[0]
            if self._rank == 0 and not quiet:
                _logger.warning("checkpoint %s is refused: %s", path, reasons[0])
        return None

    def existing(self, quiet: bool = False) -> CheckpointInfo:
        """As `latest`, but there must be an intact checkpoint.

        Raises: MissingFile if there is no checkpoint, DamagedCheckpoint if none is intact; on all ranks.
        """
        if (info := self.latest(quiet)) is not None:
            return info
        if self.refused:
            path, reason = next(iter(self.refused.items()))
            raise DamagedCheckpoint(f"no checkpoint in {self.folder} can be read: {path} is refused, {reason}")
        raise MissingFile(f"{self.folder} holds no checkpoint")

    def check_used(self, info: CheckpointInfo, tensors: Mapping[str, LocalTensor], ignored: str = "") -> None:
        """Refuse a checkpoint with tensors that no rank loads, except names that begin with `ignored`.

        Values of parameter groups that are not stepped now, and attributes of layers in older checkpoints, need not be
        loaded either.

        Raises: ValueError naming some of them, on all ranks alike.
        """
        names_by_rank = gather_json(sorted({self._source(name) for name in tensors}), self._control)
        unused = sorted(info.stored.keys() - {name for names in names_by_rank for name in names})
        may_stay = (f"{ATTRIBUTE}.", f"{ATTRIBUTE}@", *([ignored] if ignored else []))
        unused = [name for name in unused if not name.startswith(may_stay)]
        unused = [name for name in unused if not (name.startswith(STATE) and is_of_all(state_name(name)[1]))]
        if unused:
            raise ValueError(f"checkpoint {info.path} holds {len(unused)} tensors that the model lacks: {unused[:3]}")

    def load(self, info: CheckpointInfo, tensors: Mapping[str, LocalTensor]) -> None:
        """Copy stored values into this rank's tensors, by name and in place; nothing else is read.

        Raises: FileNotFoundError with the path of a file that is gone; ValueError for a tensor that is not stored,
        or stored in another shape. Every rank raises when one does.
        """
        on_all_ranks(
            lambda: self._load(info, tensors),
            self._control,
            ValueError,
            FileNotFoundError,
            otherwise=CheckpointError,
        )

    def restore(self, info: CheckpointInfo, act: Callable[[Any], T]) -> T:
        """Call `act` with the JSON value that this rank saved, or with rank 0's if their number has changed.

        Raises: DamagedCheckpoint if the value is not what a run saves, and the act's own ValueError; on all ranks.
        """
        rank = self._rank if len(info.rank_values) == self._num_ranks else 0

        def restored() -> T:
            try:
                return act(info.rank_values[rank])
            except (LookupError, ArithmeticError, TypeError, AttributeError, RuntimeError) as error:
                raise DamagedCheckpoint(f"{info.path}: rank {rank}'s values are none of a run ({error!r})") from error

        return on_all_ranks(restored, self._control, ValueError, otherwise=CheckpointError, message="{error}")

    def _source(self, name: str) -> str:
        if name.startswith(STATE):
            kind, parameter = state_name(name)
            return f"{STATE}{kind}.{self._aliases.get(parameter, parameter)}"
        return self._aliases.get(name, name)

    def _load(self, info: CheckpointInfo, tensors: Mapping[str, LocalTensor]) -> None:
        sources = {name: self._source(name) for name in tensors}
        stored = info.stored
        missing = sorted(name for name, source in sources.items() if source not in stored)
        if missing:
            raise ValueError(f"checkpoint {info.path} lacks {len(missing)} of the tensors asked for: {missing[:3]}")
        destinations: dict[str, list[tuple[Indices, Tensor]]] = {}
        for name, source in sources.items():
            for name_in_file, indices, destination in _copies(info, name, stored[source], tensors[name]):
                destinations.setdefault(name_in_file, []).append((indices, destination))
        unread = set(destinations)
        for path in (info.path / file for file in sorted(info.files)):
            try:
                with safe_open(path, framework="pt") as file:
                    present = destinations.keys() & file.keys()
                    # Only the slices that are copied are in memory.
                    for name in sorted(present):
                        for indices, destination in destinations[name]:
                            destination.copy_(take(file, name, indices))
                    unread -= present
            except SafetensorError as error:
                raise DamagedCheckpoint(f"{path} is no safetensors file ({error})") from None
        if unread:
            raise DamagedCheckpoint(f"checkpoint {info.path}: none of its files holds {min(unread)}")


def _copies(
    info: CheckpointInfo, name: str, stored: Sequence[StoredSlice], local: LocalTensor
) -> list[tuple[str, Indices, Tensor]]:
    """The copies into a rank's tensor: name in the file, indices there, and destination; only dtypes may differ."""
    all_copies, full_shape = [], stored[0].part.full_shape
    for part, values in local_slices(local).items():
        if part.full_shape != full_shape:
            raise ValueError(f"{name} has the shape {part.full_shape}, but checkpoint {info.path} holds {full_shape}")
        for record in (info.tensors[one.name] for one in stored):
            if getattr(torch, record.dtype).is_floating_point != values.is_floating_point():
                raise ValueError(f"{name} is of {values.dtype}, but checkpoint {info.path} holds {record}")
        all_copies += copies(stored, part, values)
    return all_copies


def take(file: Any, name: str, indices: Indices) -> Tensor:
    """Read a part of a tensor from an open file."""
    return file.get_slice(name)[indices] if indices else file.get_tensor(name)


# ---- Saving


class AnotherRun(ValueError):
    """The folder belongs to a run with other settings."""


class Checkpointer(CheckpointReader):
    """Saves and loads the checkpoints of one run, which owns the folder; see `CheckpointReader`.

    If several ranks have the same slice of a tensor, one of them saves it; slices are divided evenly.

    Raises: AnotherRun on every rank if the folder belongs to a run of another identity; ValueError.
    """

    #: how many of the newest checkpoints stay
    _keep: int
    #: True for a folder of `Engine.save`, outside of a run's: missing parents are made, and a save deletes checkpoints
    #: of later steps, so that the last one saved is the newest
    _standalone: bool
    #: stored name -> its latest values, in host memory that is kept from save to save
    _host_copies: dict[str, Tensor]
    #: the save under way: its thread, and the error that has ended it
    _writing: tuple[threading.Thread, list[Exception]] | None
    #: the group of all ranks whose messages go beside training
    _background: dist.ProcessGroup | None

    def __init__(
        self,
        folder: Path | str,
        grid: Grid,
        identity: Mapping[str, Any],
        keep: int = 3,
        aliases: Mapping[str, str] | None = None,
        standalone: bool = False,
    ) -> None:
        if keep < 1:
            raise ValueError(f"at least 1 checkpoint must be kept, not {keep}")
        super().__init__(folder, grid, identity, aliases)
        self._keep, self._standalone = keep, standalone
        self._host_copies, self._writing, self._background = {}, None, grid.background
        claim = self._claim if self._rank == 0 else lambda: None
        on_all_ranks(claim, self._control, AnotherRun, otherwise=CheckpointError)

    def save(self, step: int, tensors: Mapping[str, LocalTensor], extra: Any = None, wait: bool = False) -> None:
        """Copy this rank's tensors to host memory and write them while training goes on.

        `extra` is a JSON value of this rank. An earlier save is finished first, and with `wait` this one as well.

        Raises: CheckpointError for the earlier save; ValueError if ranks disagree on the step or on the shape of a
        tensor, or their slices do not make up a whole.
        """
        self.finish()
        staging = self.folder / f"{_SAVING}{folder_name(step)}"
        records, extra = self._together(step, self._control, lambda: self._prepare(staging, tensors, extra))
        stored, writer_of = _plan_save(step, records, self._control)
        parts = {name: values for name, (values, _) in records.items() if writer_of[name] == self._rank}
        # Together, since host memory may be short on one rank, and writers wait for each other without a limit.
        copies = self._together(
            step, self._control, lambda: {name: self._copy_to_host(name, values) for name, values in parts.items()}
        )
        errors: list[Exception] = []
        job = (step, staging, stored, copies, extra, errors)
        thread = threading.Thread(target=self._write, args=job, name="checkpoint writer", daemon=True)
        thread.start()
        self._writing = thread, errors
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way is published.

        Raises: CheckpointError when it failed, on this rank or another.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        thread, errors = writing
        thread.join()
        for error in errors:
            raise CheckpointError(str(error)) from error

    def _prepare(
        self, staging: Path, tensors: Mapping[str, LocalTensor], extra: Any
    ) -> tuple[dict[str, tuple[Tensor, TensorRecord]], Any]:
        """This rank's slices with their records by stored name, and a copy of `extra`; rank 0 makes the folder."""
        records: dict[str, tuple[Tensor, TensorRecord]] = {}
        for name, local in tensors.items():
            # A lazily conjugated tensor has other bytes than its copy on another rank.
            whole = local.resolve_conj() if isinstance(local, Tensor) else local
            for part, values in local_slices(whole).items() if self._source(name) == name else ():
                record = TensorRecord(name, part, str(values.dtype).removeprefix("torch."))
                records[record.stored_name] = values, record
        if self._rank == 0:
            remove(staging, ignore_errors=True)
            staging.mkdir()
        # The caller may change the value while the writer runs.
        return records, json.loads(json.dumps(extra))

    def _write(
        self,
        step: int,
        staging: Path,
        stored: Mapping[str, TensorRecord],
        copies: Mapping[str, Tensor],
        extra: Any,
        errors: list[Exception],
    ) -> None:
        """Write a save beside training, in a thread of its own; an error is added to `errors`."""

        def report() -> dict[str, Any]:
            names = write_tensors(staging, self._rank, copies)
            return {"files": {name: describe_file(staging / name) for name in names}, "extra": extra}

        group = self._background
        try:
            # Gathering is also the barrier: rank 0 publishes when every rank's files are on the disk.
            reports = gather_json(self._together(step, group, report), group)
            self._together(step, group, lambda: self._publish(staging, step, stored, reports))
        except Exception as error:
            errors.append(error)

    def _together(self, step: int, group: dist.ProcessGroup | None, act: Callable[[], T]) -> T:
        """Act on all ranks. Raises: CheckpointError on all ranks if one fails."""

        def named() -> T:
            try:
                return act()
            except Exception as error:
                reason = f"{type(error).__name__}: {words_of(error)}"
                if isinstance(error, OSError):
                    # A full disk's error has no path.
                    reason = f"{error.filename or self.folder}: {(error.strerror or str(error)).lower()}"
                raise CheckpointError(f"step {step} could not be saved: rank {self._rank}: {reason}") from error

        return on_all_ranks(named, group, CheckpointError, message="{error}")

    def _claim(self) -> None:
        """Claim the folder for this run and delete the remains of killed saves; called on rank 0."""
        try:
            self.folder.mkdir(parents=self._standalone, exist_ok=True)
            self._write_identity()
            for path in self.folder.glob(f"{_REPLACED}*"):
                # Killed between two renames: the old checkpoint is still the published one.
                original = self.folder / path.name.removeprefix(_REPLACED)
                if not original.exists():
                    path.rename(original)
            for prefix in (_SAVING, _REPLACED, _DELETING):
                for path in self.folder.glob(f"{prefix}*"):
                    remove(path)
            # A save begins with a new folder: a failure now is better than one after a day of training.
            trial = self.folder / f"{_SAVING}trial"
            trial.mkdir()
            trial.rmdir()
        except FileExistsError:
            raise AnotherRun(f"{self.folder} is no folder; remove it, or give another folder") from None
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CheckpointError(f"{self.folder} cannot be written: {reason}; give another folder") from error

    def _write_identity(self) -> None:
        """Write the run's identity into the folder. Raises: AnotherRun if it has another one."""
        run_file = self.folder / OWNER_FILE
        if not run_file.exists():
            write_durably(run_file, json.dumps({"identity": self._identity}, indent=1))
            return
        try:
            changed = differing(self._identity, read_json_object(run_file)["identity"])
        except (OSError, ValueError, LookupError, AttributeError):
            raise AnotherRun(f"{run_file} cannot be read; give another folder") from None
        if changed:
            raise AnotherRun(f"{self.folder} holds another run: {'; '.join(changed[:5])}; give another folder")

    def _copy_to_host(self, name: str, tensor: Tensor) -> Tensor:
        """Copy into host memory that is reused: fresh pages cost several times the copy itself."""
        buffer = self._host_copies.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host_copies[name] = buffer
        return buffer.copy_(tensor.detach())

    def _publish(
        self, staging: Path, step: int, tensors: Mapping[str, TensorRecord], reports: list[dict[str, Any]]
    ) -> None:
        """Write the manifest and give the checkpoint its name, on rank 0."""
        if self._rank > 0:
            return
        files = {name: record for report in reports for name, record in report["files"].items()}
        values = tuple(report["extra"] for report in reports)
        write_manifest(CheckpointInfo(staging, step, self._identity, values, tensors, files))
        target = self.folder / folder_name(step)
        replaced = self.folder / f"{_REPLACED}{target.name}"
        with naming(target):
            # A dangling link is in the way, too.
            if target.exists() or target.is_symlink():
                target.rename(replaced)
            staging.rename(target)
        sync_folder(self.folder)
        self.refused.pop(target, None)
        remove(replaced, ignore_errors=True)
        self._prune(step)

    def _prune(self, step: int) -> None:
        """Delete all but the newest intact checkpoints up to this step, and damaged ones older than those."""
        later = [path for path in published(self.folder) if step_of(path) > step and self._standalone]
        older = [path for path in published(self.folder) if step_of(path) <= step]
        intact = [path for path in older if path not in self.refused]
        oldest_kept = step_of(intact[-self._keep :][0])
        for path in [*later, *(path for path in older if step_of(path) < oldest_kept)]:
            # Renamed first: half deleted, it would be taken for a damaged checkpoint.
            remove(path.rename(self.folder / f"{_DELETING}{path.name}"), ignore_errors=True)


def _plan_save(
    step: int, records: Mapping[str, tuple[Tensor, TensorRecord]], group: dist.ProcessGroup | None
) -> tuple[dict[str, TensorRecord], dict[str, int]]:
    """Divide the writing of all slices among ranks, by bytes: stored name -> the tensor, and -> its writer."""
    plan_here = {name: [record.to_json(), tensor.nbytes] for name, (tensor, record) in records.items()}
    by_rank = gather_json({"step": step, "tensors": plan_here}, group)
    if len({plan["step"] for plan in by_rank}) > 1:
        raise ValueError(f"ranks save different steps: {[plan['step'] for plan in by_rank]}")
    holders: dict[str, list[int]] = {}
    sizes_bytes: dict[str, int] = {}
    tensors: dict[str, TensorRecord] = {}
    for rank, plan in enumerate(by_rank):
        for name, (json_record, size_bytes) in sorted(plan["tensors"].items()):
            record = TensorRecord.from_json(name, json_record)
            if tensors.setdefault(name, record) != record:
                raise ValueError(f"{name} is {tensors[name]} on rank {holders[name][0]} and {record} on rank {rank}")
            sizes_bytes[name] = size_bytes
            holders.setdefault(name, []).append(rank)
    check_cover(tensors)
    loads_bytes = [0] * len(by_rank)
    writer_of: dict[str, int] = {}
    # Tensors that only one rank has come first, then large before small.
    for name in sorted(tensors, key=lambda name: (len(holders[name]) > 1, -sizes_bytes[name], name)):
        writer_of[name] = min(holders[name], key=lambda rank: (loads_bytes[rank], rank))
        loads_bytes[writer_of[name]] += sizes_bytes[name]
    return dict(sorted(tensors.items())), writer_of


def write_tensors(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> list[str]:
    """Write a rank's tensors through to the disk; returns the names of the files.

    Equal tensors give equal bytes: safetensors orders them by dtype and name, and metadata of more than one key would
    have a random order.
    """
    most_bytes = max(_FILE_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // _MAX_FILES)
    files: list[dict[str, Tensor]] = []
    file_bytes = 0
    for name, tensor in sorted(tensors.items()):
        if not files or file_bytes + tensor.nbytes > most_bytes:
            files.append({})
            file_bytes = 0
        files[-1][name] = tensor
        file_bytes += tensor.nbytes
    names = [f"model-{rank:05d}-{i:05d}{TENSOR_SUFFIX}" for i in range(len(files))]
    for name, content in zip(names, files, strict=True):
        with naming(folder / name), (folder / name).open("wb") as file:
            file.write(save(content, metadata={"format": "pt"}))
            file.flush()
            os.fsync(file.fileno())
    return names

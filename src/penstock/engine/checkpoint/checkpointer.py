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
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
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
    describe_file,
    differing,
    examine,
    folder_name,
    published,
    step_of,
    warn_of,
    write_manifest,
)
from penstock.engine.optimizer.state import STATE, is_of_all, state_name
from penstock.io.files import naming, read_json_object, remove, sync_folder, write_durably
from penstock.parallel import Grid
from penstock.parallel.host import Gather, gather_json, on_all_ranks
from penstock.parallel.tensor_slice import Indices, LocalTensor, StoredSlice, copies, local_slices
from penstock.settings.declare import words_of

_SAVING, _REPLACED, _DELETING = ".saving-", ".replaced-", ".deleting-"
# The safetensors library writes a file in one call that holds the interpreter: some 10 ms at this size, during which
# training cannot launch anything. Large states get larger files, so that their number stays sensible.
_FILE_BYTES = 16 * 2**20
_MAX_FILES = 64

T = TypeVar("T")


# ---- Loading


class CheckpointReader:
    """Loads the checkpoints of one run from its folder, to which another process may be writing.

    Every rank of the grid makes one and calls alike.
    """

    #: the folder of the checkpoints, each a folder of its own; or a single checkpoint
    folder: Path
    #: damaged checkpoint -> what is wrong with it
    refused: dict[Path, str]
    #: this rank's place, and its groups
    _grid: Grid
    #: gathers each rank's JSON value
    _gather: Callable[[Any], list[Any]]
    #: the settings that make this run what it is, as JSON gives them back; None to read any run
    _identity: Any
    #: names of tensors that are equal to another by construction (tied copies) -> that other's name, under which alone
    #: they and their optimizer state are stored
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

        Values of parameter groups that are not stepped now, and attributes of layers, which older checkpoints hold,
        need not be asked for either.

        Raises: ValueError naming some of them, on all ranks alike.
        """
        asked = self._gather(sorted({self._source(name) for name in tensors}))
        unused = sorted(info.stored.keys() - {name for names in asked for name in names})
        unused = [name for name in unused if not (ignored and name.startswith(ignored))]
        unused = [name for name in unused if not name.startswith((f"{ATTRIBUTE}.", f"{ATTRIBUTE}@"))]
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

    def _source(self, name: str) -> str:
        """The name under which a tensor is stored."""
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
        wanted: dict[str, list[tuple[Indices, Tensor]]] = {}
        for name, source in sources.items():
            for name_in_file, indices, into in _copies(info, name, stored[source], tensors[name]):
                wanted.setdefault(name_in_file, []).append((indices, into))
        for file in info.files:
            if not (info.path / file).exists():
                raise FileNotFoundError(f"checkpoint file {info.path / file} is missing")
        unread = set(wanted)
        for path in sorted(info.path.glob(f"*{TENSOR_SUFFIX}")):
            try:
                with safe_open(path, framework="pt") as file:
                    found = wanted.keys() & file.keys()
                    # One stretch at a time.
                    for name in sorted(found):
                        for indices, into in wanted[name]:
                            into.copy_(take(file, name, indices))
                    unread -= found
            except SafetensorError as error:
                raise DamagedCheckpoint(f"{path} is no safetensors file ({error})") from None
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


def take(file: Any, name: str, indices: Indices) -> Tensor:
    """Part of a tensor of an open file; nothing else is read."""
    return file.get_slice(name)[indices] if indices else file.get_tensor(name)


# ---- Saving


class AnotherRun(ValueError):
    """The folder holds checkpoints of a run with other settings."""


class Checkpointer(CheckpointReader):
    """Saves and loads the checkpoints of one run, which owns the folder; see `CheckpointReader`.

    Where several ranks have the same slice of a tensor, one of them saves it; they take turns.

    Raises: AnotherRun on every rank when the folder belongs to a run of another identity; ValueError.
    """

    #: how many of the newest checkpoints stay
    _keep: int
    #: True if the folder is within no run's. Then folders around it are made where they are missing (those of a run are
    #: there, unless somebody has deleted them), and checkpoints of later steps than the one saved are deleted, so that
    #: the last one saved is the one found
    _standalone: bool
    #: stored name -> its latest values, in host memory that is kept from save to save
    _host_copies: dict[str, Tensor]
    #: the save under way: its thread, and what becomes of it
    _writing: tuple[threading.Thread, Future[None]] | None

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
        self._host_copies, self._writing = {}, None
        kinds = AnotherRun, ValueError, FileNotFoundError
        claim = self._claim if grid.rank == 0 else lambda: None
        on_all_ranks(claim, self._gather, *kinds, otherwise=CheckpointError)

    def save(self, step: int, tensors: Mapping[str, LocalTensor], extra: Any = None, wait: bool = False) -> None:
        """Copy this rank's tensors to host memory and write them while training goes on.

        `extra` is a JSON value of this rank. A save before this one is finished first. With `wait` this one is, too.

        Raises: CheckpointError, for the save before this one; ValueError where ranks disagree on the step or on the
        shape of a tensor, or where their slices do not make up a whole.
        """
        self.finish()
        staging = self.folder / f"{_SAVING}{folder_name(step)}"
        texts: list[str] = []
        own: dict[str, tuple[Tensor, TensorRecord]] = {}

        def prepare() -> None:
            # As text at once: the caller may change the value while the writer runs.
            try:
                texts.append(json.dumps(extra))
            except (TypeError, ValueError) as error:
                text = f"extra is no JSON value ({error}); give numbers, texts, lists and dicts"
                raise type(error)(text) from None
            for name, local in tensors.items():
                # A copy that another rank saves may be conjugated by a mark, and this one not.
                whole = local.resolve_conj() if isinstance(local, Tensor) else local
                for part, values in local_slices(whole).items() if self._source(name) == name else ():
                    record = TensorRecord(name, part, str(values.dtype).removeprefix("torch."))
                    own[record.stored_name] = values, record
            if self._grid.rank == 0:
                remove(staging, ignore_errors=True)
                staging.mkdir()

        self._begin(step, prepare)
        stored, writer_of, file_of = _plan_save(step, own, self._gather)
        copies: dict[str, Tensor] = {}

        def copy() -> None:
            for name, writer in writer_of.items():
                if writer == self._grid.rank:
                    copies[name] = self._copy_to_host(name, own[name][0])

        # Host memory may be short on one rank, and the writers wait for each other without a limit.
        self._begin(step, copy)

        def write() -> None:
            reports = self._written(staging, step, copies, file_of, json.loads(texts[0]))
            error = None
            if self._grid.rank == 0:
                try:
                    self._publish(staging, step, stored, reports)
                except Exception as caught:
                    error = _reason(caught, staging)
            _raise_first(step, gather_json(error, self._grid.background))

        self._writing = _begun(write)
        if wait:
            self.finish()

    def finish(self) -> None:
        """Wait until the save under way is published.

        Raises: CheckpointError when it failed, on this rank or another.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return
        thread, written = writing
        thread.join()
        if (error := written.exception()) is not None:
            raise CheckpointError(str(error)) from error

    def _begin(self, step: int, act: Callable[[], None]) -> None:
        """Do what comes before the writing. Raises: CheckpointError; on all ranks if on one."""

        def named() -> None:
            try:
                act()
            except (TypeError, ValueError):
                # The caller's mistake, not the disk's.
                raise
            except Exception as error:
                raise _not_saved(step, self._grid.rank, _reason(error, self.folder)) from error

        on_all_ranks(named, self._gather, CheckpointError, message="{error}")

    def _claim(self) -> None:
        """Claim the folder for this run and clear away what a killed one left; rank 0."""
        try:
            self.folder.mkdir(parents=self._standalone, exist_ok=True)
        except FileExistsError:
            raise AnotherRun(f"{self.folder} is no folder; remove it, or give another folder") from None
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be made: {error.strerror}; give another folder") from error
        run_file = self.folder / OWNER_FILE
        if run_file.is_symlink():
            raise AnotherRun(f"{run_file} is a link to {run_file.readlink()}; put the file itself there")
        if run_file.exists():
            try:
                if not run_file.is_file():
                    # A pipe would keep its reader waiting.
                    raise ValueError
                theirs = read_json_object(run_file)["identity"]
                changed = differing(self._identity, theirs)
            except (OSError, ValueError, KeyError, AttributeError):
                raise AnotherRun(f"{run_file} cannot be read; give another folder") from None
            if changed:
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
                remove(path)
        try:
            # What a save begins with: better found now than after a day of training.
            trial = self.folder / f"{_SAVING}trial"
            trial.mkdir()
            trial.rmdir()
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CheckpointError(f"{self.folder} cannot be written: {reason}; give another folder") from error

    def _copy_to_host(self, name: str, tensor: Tensor) -> Tensor:
        """Copy into host memory kept from save to save: fresh pages cost several times the copy itself."""
        buffer = self._host_copies.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._host_copies[name] = buffer
        return buffer.copy_(tensor.detach())

    def _written(
        self, staging: Path, step: int, copies: Mapping[str, Tensor], file_of: dict[str, int], extra: Any
    ) -> list[dict[str, Any]]:
        """Write this rank's part, and wait for those of all others; in the background on every rank."""
        files, error = {}, None
        try:
            names = write_tensors(staging, copies, file_of)
            files = {name: describe_file(staging / name) for name in names}
        except Exception as caught:
            error = _reason(caught, staging)
        # Gathering is also the barrier: rank 0 publishes when every rank's files are on the disk.
        reports = gather_json({"files": files, "extra": extra, "error": error}, self._grid.background)
        _raise_first(step, [report["error"] for report in reports])
        return reports

    def _publish(
        self, staging: Path, step: int, tensors: Mapping[str, TensorRecord], reports: list[dict[str, Any]]
    ) -> None:
        files = {name: record for report in reports for name, record in report["files"].items()}
        values = tuple(report["extra"] for report in reports)
        write_manifest(CheckpointInfo(staging, step, self._identity, values, tensors, files))
        target = self.folder / folder_name(step)
        replaced = self.folder / f"{_REPLACED}{target.name}"
        with naming(target):
            # A link that leads nowhere is in the way, too.
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
            # Under its own name it would be a damaged checkpoint once the first file is gone.
            remove(path.rename(self.folder / f"{_DELETING}{path.name}"), ignore_errors=True)


def _begun(work: Callable[[], None]) -> tuple[threading.Thread, Future[None]]:
    written = Future[None]()

    def run() -> None:
        try:
            written.set_result(work())
        except Exception as error:
            written.set_exception(error)

    thread = threading.Thread(target=run, name="checkpoint writer", daemon=True)
    thread.start()
    return thread, written


def _plan_save(
    step: int, own: Mapping[str, tuple[Tensor, TensorRecord]], gather: Gather
) -> tuple[dict[str, TensorRecord], dict[str, int], dict[str, int]]:
    """Divide all ranks' slices among the ranks that have them, and among files, by bytes.

    Returns by stored name, the same on every rank: the tensor, the rank that writes it, and the number of its file,
    from 1 over all ranks.

    Raises: ValueError on every rank when ranks disagree on the step, or on a tensor's shape or type, or when their
    slices do not make up a whole.
    """
    described = {name: [record.to_json(), tensor.nbytes] for name, (tensor, record) in own.items()}
    by_rank = gather({"step": step, "tensors": described})
    if len({theirs["step"] for theirs in by_rank}) > 1:
        raise ValueError(f"ranks save different steps: {[theirs['step'] for theirs in by_rank]}")
    holders: dict[str, list[int]] = {}
    sizes_bytes: dict[str, int] = {}
    tensors: dict[str, TensorRecord] = {}
    for rank, theirs in enumerate(by_rank):
        for name, (json_record, size_bytes) in sorted(theirs["tensors"].items()):
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
    file_of: dict[str, int] = {}
    num_files = 0
    for rank, load_bytes in enumerate(loads_bytes):
        cap_bytes, file_bytes = max(_FILE_BYTES, load_bytes // _MAX_FILES), None
        for name in sorted(name for name, writer in writer_of.items() if writer == rank):
            if file_bytes is None or file_bytes + sizes_bytes[name] > cap_bytes:
                num_files, file_bytes = num_files + 1, 0
            file_bytes += sizes_bytes[name]
            file_of[name] = num_files
    return dict(sorted(tensors.items())), writer_of, file_of


def _raise_first(step: int, errors: list[str | None]) -> None:
    for rank, error in enumerate(errors):
        if error is not None:
            raise _not_saved(step, rank, error)


def _reason(error: Exception, folder: Path) -> str:
    """The reason why nothing could be written below `folder`, with a path; other errors come with their class.

    A full disk's error has none.
    """
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {words_of(error)}"
    path = error.filename if error.filename is not None else folder
    return f"{path}: {(error.strerror or str(error)).lower()}"


def _not_saved(step: int, rank: int, error: str) -> CheckpointError:
    return CheckpointError(f"step {step} could not be saved: rank {rank}: {error}")


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], file_of: Mapping[str, int]) -> list[str]:
    """Write each tensor into the file of its number; return the names of the files, which are on the disk by then.

    Equal tensors give equal bytes: safetensors orders them by dtype and name, and more than one word about a file would
    stand in another order each time.
    """
    by_file: dict[int, dict[str, Tensor]] = {}
    for name in tensors:
        by_file.setdefault(file_of[name], {})[name] = tensors[name]
    names = {number: f"model-{number:05d}-of-{max(file_of.values()):05d}{TENSOR_SUFFIX}" for number in sorted(by_file)}
    for number, name in names.items():
        with naming(folder / name), (folder / name).open("wb") as file:
            file.write(save(by_file[number], metadata={"format": "pt"}))
            file.flush()
            os.fsync(file.fileno())
    return list(names.values())

"""The folder of a run: its owner, the lock that admits one writer at a time, and the metrics of its steps."""

import fcntl
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from penstock.io.files import (
    lines_of,
    naming,
    open_file,
    parse_json,
    read_bytes,
    refuse_link_out,
    sync_folder,
    toml_text,
    unfinished,
    write_durably,
)
from penstock.settings import ConfigError, LogConfig, RunConfig, differences, read_config

RUN_FILE = "run.toml"
CHECKPOINT_FOLDER = "checkpoints"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MODEL_FOLDER = "model_files"
"""The folder of a run with its tokenizer and, of a run that began with a model, that model's settings."""
TOKENIZER_FILE, CONFIG_FILE, GENERATION_FILE = "tokenizer.json", "config.json", "generation_config.json"
TOKENIZER_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    GENERATION_FILE,
)
_LOCK_FILE = ".lock"
_DECAY_END = "optimizer.num_decay_steps"

_logger = logging.getLogger(__name__)


def to_toml(config: RunConfig) -> str:
    """Write the settings as TOML that reads back as the same settings; None values are left out."""
    return toml_text(_without_none(config.to_dict()))


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in table.items()
        if value is not None
    }


def check_libraries(config: RunConfig) -> None:
    """Raises: ConfigError where a library that a run writes its folder with is not installed."""
    if config.log.tensorboard and find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard = true needs the library tensorboard, which is not installed; install it with "
            "pip install tensorboard, or leave the setting out"
        )


def writes_tensorboard(log: LogConfig) -> bool:
    """True for a run that also writes for TensorBoard: if it is to, or says nothing and the library is installed."""
    return find_spec("tensorboard") is not None if log.tensorboard is None else log.tensorboard


def read_run(folder: Path) -> RunConfig:
    """The settings of the run in a folder. Raises: ConfigError, also where its file is a link out of the folder."""
    try:
        refuse_link_out(folder / RUN_FILE, folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return read_config(folder / RUN_FILE)


def tokenizer_of(config: RunConfig) -> str:
    """The place of a run's tokenizer: its own copy, once its folder has one, or else what the settings name."""
    folder, name = Path(config.output), config.data.tokenizer or "bytes"
    own = folder / MODEL_FOLDER
    has_own = name != "bytes" and (own / TOKENIZER_FILE).is_file() and (folder / RUN_FILE).is_file()
    return str(own) if has_own and read_run(folder).data.tokenizer == name else name


def continued_run(config: RunConfig) -> RunConfig | None:
    """The settings of the run in `config.output`, where it goes on and needs its `model.pretrained` no more."""
    folder = Path(config.output)
    if not (folder / RUN_FILE).is_file() or not any((folder / CHECKPOINT_FOLDER).glob("step-*")):
        return None
    known = read_run(folder)
    # Transformers' layers are described by the model's folder.
    return known if known.model.pretrained == config.model.pretrained and known.model.native is not False else None


def model_files(config: RunConfig) -> dict[str, Path]:
    """The files of the model, but its weights, that a run keeps in its folder, by their names there.

    They are the tokenizer's, and the settings of the model that the run begins with.
    """
    name, found = config.data.tokenizer or "bytes", {}
    if config.model.pretrained is not None:
        base = Path(config.model.pretrained)
        for folder in (base / MODEL_FOLDER, base):
            theirs = (CONFIG_FILE, GENERATION_FILE, *(TOKENIZER_FILES if name == "bytes" else ()))
            found |= {own: folder / own for own in theirs if (folder / own).is_file()}
    if name != "bytes":
        place = Path(name).expanduser()
        folder = place if place.is_dir() else place.parent
        # A file stands for itself: it may lie beside a model that it does not belong to.
        names = [own for own in TOKENIZER_FILES if place.is_dir() or own not in (TOKENIZER_FILE, GENERATION_FILE)]
        found |= {own: folder / own for own in names if (folder / own).is_file()}
        found |= {} if place.is_dir() else {TOKENIZER_FILE: place}
    return found


def check_folder(config: RunConfig, fresh: bool = False, resume: bool = False) -> bool:
    """True where `config.output` already holds this very run, to be continued; nothing is written.

    Raises:
        ConfigError: it holds another run, or one that has lost its checkpoints, or anything that is no run, or (with
            `fresh`) any run at all, or (with `resume`) none.
    """

    def none() -> bool:
        if resume:
            raise ConfigError(f"output = {config.output!r} holds no run to continue; leave out --resume to start one")
        return False

    folder = Path(config.output)
    if not folder.exists():
        return none()
    if not folder.is_dir():
        raise ConfigError(f"output = {config.output!r} is a file; give a folder")
    copy = folder / RUN_FILE
    # What the run writes would go wherever they lead. A folder of checkpoints may lie on another disk.
    if links := sorted(path for path in folder.iterdir() if path.is_symlink() and not path.is_dir()):
        raise ConfigError(f"{links[0]} is a link to {links[0].readlink()}; put the file itself there, or remove it")
    if others := sorted(path for path in folder.iterdir() if not path.is_dir() and not path.is_file()):
        raise ConfigError(f"{others[0]} is no regular file; remove it")
    if not copy.exists():
        # A start that was killed may have come no further than these.
        ours = {_LOCK_FILE, unfinished(copy).name}
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in ours)
        if strangers:
            raise ConfigError(
                f"output = {config.output!r} holds {strangers[0]!r} and no run; give a new or an empty folder"
            )
        return none()
    if fresh:
        raise ConfigError(f"output = {config.output!r} already holds a run; --fresh takes another --output")
    theirs = read_config(copy)
    if theirs.digest() != config.digest():
        ours, known = config.identity(), theirs.identity()
        changed = differences(ours, known)
        # Left out, the decay ends with the run, so that another length alone makes it differ.
        lengthened = len(changed) == 1 and ours[_DECAY_END] != known[_DECAY_END] is not None
        otherwise = f"give {_DECAY_END} = {known[_DECAY_END]}, which keeps its decay, or" if lengthened else "give"
        raise ConfigError(
            f"output = {config.output!r} holds another run: {'; '.join(changed)}; {otherwise} another --output"
        )
    metrics, board = folder / METRICS_FILE, folder / TENSORBOARD_FOLDER
    if metrics.is_dir():
        raise ConfigError(f"{metrics} is a folder, but the run writes a file there; remove it")
    if metrics.exists():
        open_file(metrics).close()
    tensorboard = writes_tensorboard(config.log)
    if tensorboard and board.exists() and not board.is_dir():
        raise ConfigError(f"{board} is a file, but the run writes a folder there; remove it")
    for path in (board, folder / CHECKPOINT_FOLDER) if tensorboard else (folder / CHECKPOINT_FOLDER,):
        if path.is_dir() and not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(f"{path} cannot be written: permission denied")
    _refuse_lost_checkpoints(folder, theirs.checkpoint.every)
    return True


def _refuse_lost_checkpoints(folder: Path, every: int) -> None:
    """Refuse to start a run anew where its metrics show that it has had checkpoints.

    every: steps between them at the run's latest start. Of two the first is there when the second is begun.
    """
    checkpoints, metrics = folder / CHECKPOINT_FOLDER, folder / METRICS_FILE
    # One that is being replaced has another name for a moment.
    if any(any(checkpoints.glob(pattern)) for pattern in ("step-*", ".replaced-step-*")):
        return
    last = max((entry["step"] for entry in read_metrics(metrics)), default=0)
    if last == 0:
        return
    # Only now, since it loads PyTorch.
    from penstock.engine.checkpoint.manifest import OWNER_FILE

    if not (checkpoints / OWNER_FILE).exists() or 0 < 2 * every < last:
        raise ConfigError(
            f"{checkpoints} holds no checkpoint, but {metrics} has steps up to {last}; bring the folder back (is its "
            "disk there?), or start anew with another --output"
        )


class RunLock:
    """The folder of a run, locked against other runs for as long as the process lives; opened by one rank.

    Raises:
        ConfigError: the folder holds another run, or a run is writing there now.
    """

    #: the folder
    path: Path
    #: True where the folder held this run already
    continued: bool
    #: descriptor of the locked file
    _lock: int

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output)
        continued = check_folder(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            raise ConfigError(f"output = {config.output!r} cannot be written: {error.strerror}") from None
        try:
            # The lock goes with the process, however it ends, so that a killed run can be started again at once.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"output = {config.output!r} is being written by another run; wait or stop it") from None
        self.continued = continued
        if not continued:
            try:
                self.keep(config)
            except BaseException:
                os.close(self._lock)
                raise

    def keep(self, config: RunConfig) -> None:
        """Write the settings of the latest start, and the model's files where the folder has none yet.

        Raises: ConfigError with the path that cannot be written.
        """
        own = self.path / MODEL_FOLDER
        new = unfinished(own)
        contents = {} if own.exists() else {name: read_bytes(path) for name, path in model_files(config).items()}
        try:
            write_durably(self.path / RUN_FILE, to_toml(config))
            with naming(own):
                shutil.rmtree(new, ignore_errors=True)
                if contents:
                    new.mkdir()
                    for name, content in contents.items():
                        (new / name).write_bytes(content)
                    os.replace(new, own)
                    sync_folder(self.path)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None
        finally:
            shutil.rmtree(new, ignore_errors=True)

    def close(self) -> None:
        os.close(self._lock)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The numbers of a metrics file's lines, in order; null stands for one that is not finite.

    What a user has added to a line, and lines without a step, are left out, and so are those that cannot be read, such
    as a last one that a crash has torn.
    """
    if not path.exists():
        return []
    entries = [entry for _, entry in _parsed(path) if entry is not None and "step" in entry]
    return [{name: value for name, value in entry.items() if _is_metric(value)} for entry in entries]


def _parsed(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield each line that is not blank, and its object; None where it is none, or its step is no whole number."""
    for line in lines_of(path):
        if not line.strip():
            continue
        try:
            entry = parse_json(line.decode())
        except ValueError:
            entry = None
        step = entry.get("step", 0) if isinstance(entry, dict) else None
        yield line, entry if type(step) is int and _is_metric(step) else None


class MetricsLog:
    """Appends the metrics of a run to its folder; written by one rank.

    A run that continues from `resumed_step` first drops the lines of later steps, since those steps are taken again,
    and lines that cannot be read, which the log counts. All others stay as they are, whatever a user has added to them.
    """

    #: the file of metrics, a line of JSON a step
    _path: Path
    #: the same, open for appending
    _file: TextIO
    #: TensorBoard's writer, where the run wants it
    _board: Any

    def __init__(self, folder: Path, resumed_step: int = 0, tensorboard: bool = False) -> None:
        self._path = folder / METRICS_FILE
        lines = list(_parsed(self._path)) if self._path.exists() else []
        kept = [line for line, entry in lines if entry is not None and entry.get("step", 0) <= resumed_step]
        write_durably(self._path, "".join(line.decode().rstrip() + "\n" for line in kept))
        if num_broken := sum(entry is None for _, entry in lines):
            shown = "a line" if num_broken == 1 else f"{num_broken} lines"
            _logger.warning("%s: dropped %s that could not be read", self._path, shown)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            # Takes a second to import, and only one rank of a run that wants it needs it.
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=resumed_step + 1)

    def write(self, step: int, values: Mapping[str, float | int | bool]) -> None:
        """Append the values of a step; one that is not finite becomes null, since JSON has no other word for it."""
        entry = {"step": step, **{name: value if math.isfinite(value) else None for name, value in values.items()}}
        with naming(self._path):
            self._file.write(json.dumps(entry) + "\n")
            # A run can be killed at any moment; its lines are then still there to read.
            self._file.flush()
        if self._board is not None:
            with naming(self._path.parent / TENSORBOARD_FOLDER):
                for name, value in values.items():
                    self._board.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            with naming(self._path.parent / TENSORBOARD_FOLDER):
                self._board.close()


def _is_metric(value: Any) -> bool:
    # A whole number beyond these has no double.
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**1000)

"""The folder of a run: its settings, the lock that admits one writer at a time, and the metrics of its steps."""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from penstock.io.files import (
    lines_of,
    naming,
    parse_json,
    read_bytes,
    refuse_link_out,
    toml_text,
    unfinished,
    whole_folder,
    write_durably,
)
from penstock.settings import ConfigError, LogConfig, RunConfig, differences, read_config

RUN_FILE = "run.toml"
CHECKPOINT_FOLDER = "checkpoints"
METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
MODEL_FOLDER = "model_files"
"""The folder within a run's with its tokenizer and the settings of a model that it began with."""
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


def to_toml(config: RunConfig) -> str:
    """Write the settings as TOML that reads back as the same settings; None values are left out."""
    return toml_text(config.to_dict())


def writes_tensorboard(log: LogConfig) -> bool:
    """True if a run also writes for TensorBoard, which by default it does if the library is installed.

    Raises: ConfigError if the settings ask for it and the library is not installed.
    """
    is_installed = find_spec("tensorboard") is not None
    if log.tensorboard and not is_installed:
        raise ConfigError(
            "log.tensorboard = true needs the library tensorboard, which is not installed; install it, or leave it out"
        )
    return is_installed if log.tensorboard is None else log.tensorboard


def read_run(folder: Path) -> RunConfig:
    """The settings of the run in a folder. Raises: ConfigError, also for a link that leads out of the folder."""
    try:
        refuse_link_out(folder / RUN_FILE, folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return read_config(folder / RUN_FILE)


def tokenizer_of(config: RunConfig) -> str:
    """The place of a run's tokenizer: the copy in its folder if there is one, else the one that the settings name."""
    folder, name = Path(config.output), config.data.tokenizer or "bytes"
    copies = folder / MODEL_FOLDER
    has_copy = name != "bytes" and (copies / TOKENIZER_FILE).is_file() and (folder / RUN_FILE).is_file()
    return str(copies) if has_copy and read_run(folder).data.tokenizer == name else name


def continued_run(config: RunConfig) -> RunConfig | None:
    """The settings of the run in `config.output` if it can go on without its `model.pretrained`; else None."""
    folder = Path(config.output)
    if not (folder / RUN_FILE).is_file() or not any((folder / CHECKPOINT_FOLDER).glob("step-*")):
        return None
    run = read_run(folder)
    # Transformers' layers are described by the model's folder.
    return run if run.model.pretrained == config.model.pretrained and run.model.native is not False else None


def model_files(config: RunConfig) -> dict[str, Path]:
    """The files that a run copies into its folder, by their names there.

    They are the tokenizer's, and the settings of the model that the run begins with.
    """
    name, files = config.data.tokenizer or "bytes", {}
    if config.model.pretrained is not None:
        base = Path(config.model.pretrained)
        for folder in (base / MODEL_FOLDER, base):
            names_of_model = (CONFIG_FILE, GENERATION_FILE, *(TOKENIZER_FILES if name == "bytes" else ()))
            files |= {file: folder / file for file in names_of_model if (folder / file).is_file()}
    if name != "bytes":
        place = Path(name).expanduser()
        folder = place if place.is_dir() else place.parent
        # A tokenizer given as a file may lie beside a model that it does not belong to.
        names = [file for file in TOKENIZER_FILES if place.is_dir() or file not in (TOKENIZER_FILE, GENERATION_FILE)]
        files |= {file: folder / file for file in names if (folder / file).is_file()}
        files |= {} if place.is_dir() else {TOKENIZER_FILE: place}
    return files


def check_folder(config: RunConfig, fresh: bool = False, resume: bool = False) -> bool:
    """True if `config.output` already holds this run, to be continued; nothing is written.

    Raises:
        ConfigError: the folder holds another run, one that has lost its checkpoints, or anything else; with `fresh`
            any run; with `resume` none.
    """

    folder = Path(config.output)
    copy = folder / RUN_FILE
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output = {config.output!r} is a file; give a folder")
    if resume and not copy.exists():
        raise ConfigError(f"output = {config.output!r} holds no run to continue; leave out --resume to start one")
    if not folder.exists():
        return False
    # The run would write wherever links lead. A folder of checkpoints may lie on another disk.
    if links := sorted(path for path in folder.iterdir() if path.is_symlink() and not path.is_dir()):
        raise ConfigError(f"{links[0]} is a link to {links[0].readlink()}; put the file itself there, or remove it")
    if not copy.exists():
        # A start that was killed may have left only these.
        run_files = {_LOCK_FILE, unfinished(copy).name}
        strangers = sorted(path.name for path in folder.iterdir() if path.name not in run_files)
        if strangers:
            raise ConfigError(f"output = {config.output!r} holds {strangers[0]!r} and no run; give an empty folder")
        return False
    if fresh:
        raise ConfigError(f"output = {config.output!r} already holds a run; --fresh takes another --output")
    earlier = read_config(copy)
    if earlier.digest() != config.digest():
        changed = "; ".join(differences(config.identity(), earlier.identity()))
        raise ConfigError(f"output = {config.output!r} holds another run: {changed}; give another --output")
    checkpoints, metrics = folder / CHECKPOINT_FOLDER, folder / METRICS_FILE
    # The first checkpoint is there when the second one is begun.
    if earlier.checkpoint.every and not any(checkpoints.glob("*step-*")):
        last = max((entry["step"] for entry in read_metrics(metrics)), default=0)
        if last > 2 * earlier.checkpoint.every:
            raise ConfigError(
                f"{checkpoints} holds no checkpoint, but {metrics} has steps up to {last}; bring the folder back (is "
                "its disk there?), or start anew with another --output"
            )
    return True


class RunLock:
    """The folder of a run, locked while the process lives; one rank opens it.

    Raises: ConfigError if the folder holds another run, or a run is writing there now.
    """

    #: the folder
    path: Path
    #: True if the folder already held this run
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
            # The lock ends with the process, so that a killed run can be started again at once.
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
        """Write the settings of the latest start, and at the first one the model's files.

        Raises: ConfigError with the path that cannot be written.
        """
        copies = self.path / MODEL_FOLDER
        contents = {} if copies.exists() else {name: read_bytes(path) for name, path in model_files(config).items()}
        try:
            write_durably(self.path / RUN_FILE, to_toml(config))
            if contents:
                with whole_folder(copies) as new:
                    for name, content in contents.items():
                        (new / name).write_bytes(content)
        except OSError as error:
            raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        os.close(self._lock)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics file, in order; null stands for a number that is not finite.

    Lines without a step are left out, and so are unreadable ones, such as a last one cut off by a crash.
    """
    return [entry for _, entry in _parsed(path) if entry is not None and "step" in entry] if path.exists() else []


def _parsed(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line that is not blank, with its object; None if it is none, or its step is no whole number."""
    for line in filter(bytes.strip, lines_of(path)):
        try:
            entry = parse_json(line.decode())
        except ValueError:
            entry = None
        yield line, entry if isinstance(entry, dict) and type(entry.get("step", 0)) is int else None


class MetricsLog:
    """The metrics file of a run, which one rank appends to.

    A run that continues from `resumed_step` first drops unreadable lines and those of later steps, which are taken
    again. All other lines stay as they are, whatever a user has added to them.
    """

    #: the file of metrics, a line of JSON a step
    _path: Path
    #: the open file
    _file: TextIO
    #: TensorBoard's writer; None if the run does not write for it
    _board: Any

    def __init__(self, folder: Path, resumed_step: int = 0, tensorboard: bool = False) -> None:
        self._path = folder / METRICS_FILE
        lines = _parsed(self._path) if self._path.exists() else ()
        earlier_lines = [line for line, entry in lines if entry is not None and entry.get("step", 0) <= resumed_step]
        write_durably(self._path, "".join(line.decode().rstrip() + "\n" for line in earlier_lines))
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

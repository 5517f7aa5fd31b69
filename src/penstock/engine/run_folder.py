"""The folder of a run: whose it is, and that only one run at a time writes there."""

import fcntl
import os
from pathlib import Path

from penstock.engine.config import RunConfig, differences
from penstock.engine.config_file import ConfigError, read_config, to_toml

CONFIG_FILE = "run.toml"
CHECKPOINT_FOLDER = "checkpoints"
_LOCK_FILE = ".lock"


def check_folder(config: RunConfig, fresh: bool = False, resume: bool = False) -> bool:
    """Whether `config.output` already holds this very run, to be continued; nothing is written.

    Raises:
        ConfigError: it holds another run, or anything that is no run, or (with `fresh`) any run at all, or (with
            `resume`) none.
    """
    continued = _check_folder(config, fresh)
    if resume and not continued:
        raise ConfigError(f"output = {config.output!r} holds no run to continue; leave out --resume to start one")
    return continued


def _check_folder(config: RunConfig, fresh: bool) -> bool:
    folder = Path(config.output)
    if not folder.exists():
        return False
    if not folder.is_dir():
        raise ConfigError(f"output = {config.output!r} is a file; give a folder")
    copy = folder / CONFIG_FILE
    if not copy.exists():
        strangers = sorted(path.name for path in folder.iterdir() if path.name != _LOCK_FILE)
        if strangers:
            raise ConfigError(
                f"output = {config.output!r} holds {strangers[0]!r} and no run; give a new or an empty folder"
            )
        return False
    if fresh:
        raise ConfigError(f"output = {config.output!r} already holds a run; --fresh takes another --output")
    theirs = read_config(copy)
    if theirs.digest() != config.digest():
        changed = "; ".join(differences(config.identity(), theirs.identity()))
        raise ConfigError(f"output = {config.output!r} holds another run: {changed}; give another --output")
    return True


class RunFolder:
    """A run's folder, held against other runs for as long as the process lives; opened by one rank.

    Raises:
        ConfigError: the folder holds another run, or a run is writing there now.
    """

    def __init__(self, config: RunConfig) -> None:
        self.path = Path(config.output)
        continued = check_folder(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / _LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise ConfigError(f"output = {config.output!r} can not be written: {error.strerror}") from None
        try:
            # The lock goes with the process, however it ends, so that a killed run can be started again at once.
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._lock)
            raise ConfigError(f"output = {config.output!r} is being written by another run; wait or stop it") from None
        # The settings that a continued run may change are those of its latest start.
        _write_whole(self.path / CONFIG_FILE, to_toml(config))
        self.continued = continued

    def close(self) -> None:
        os.close(self._lock)


def _write_whole(path: Path, text: str) -> None:
    """Replace a file's text in one go: a crash leaves the old text or the new one."""
    new = path.with_suffix(".new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)

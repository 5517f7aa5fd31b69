"""A file that takes long to write: line by line under a hidden name, and given its own when all is there."""

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path


class Unfinished:
    """The lines that are there so far; a call of the same `digest` finds those that a killed one has left.

    Another digest has another hidden name, so what belongs to different things is never mixed.

    Raises: ValueError if the file can not be written, or another call is writing it.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self.path, self.hidden = path, path.with_name(f".{path.name}.{digest}.unfinished")
        try:
            self._file = self.hidden.open("a+b")
        except OSError as error:
            raise ValueError(f"cannot write {path}: {(error.strerror or str(error)).lower()}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"{path} is being written by another call; wait, or give another --output") from None

    def lines(self) -> list[bytes]:
        """All whole lines: the last one may have been cut short."""
        self._file.seek(0)
        return [line for line in self._file if line.endswith(b"\n")]

    def keep(self, lines: Iterable[bytes]) -> None:
        """Drop all that comes behind these lines, with which it begins."""
        self._file.truncate(sum(map(len, lines)))

    def append(self, lines: Iterable[str], *, to_disk: bool) -> None:
        """Add lines, which the death of the process can not take back, nor, with `to_disk`, that of the machine."""
        for line in lines:
            self._file.write(line.encode() + b"\n")
        self._file.flush()
        if to_disk:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let another call go on with it."""
        self._file.close()

    def publish(self, lines: Iterable[bytes] | None = None) -> None:
        """Give the file its name; or these lines, in place of those that it holds.

        Raises: ValueError if a file of that name has come into being meanwhile; what was written stays.
        """
        whole = self.hidden
        if lines is not None:
            whole = self.hidden.with_suffix(".whole")
            with whole.open("wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        self._file.close()
        try:
            # Unlike a rename, a link never takes another file's place.
            os.link(whole, self.path)
        except FileExistsError:
            raise ValueError(f"{self.path} exists by now; what should stand there is in {self.hidden}") from None
        finally:
            if whole is not self.hidden:
                whole.unlink()
        self.hidden.unlink()


def unfinished_of(path: Path) -> list[Path]:
    """The hidden files of calls that were to write this one, whatever their digests."""
    return sorted(path.parent.glob(f".{_literal(path.name)}.*.unfinished"))


def _literal(name: str) -> str:
    """A pattern that only this name matches."""
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)

"""Files that are there whole or not at all, and errors of writing that name the file."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace a file's text in one go, through to the disk: a crash leaves the old text or the new one.

    Raises: OSError with the path, also where the disk is full.
    """
    new = unfinished(path)
    with naming(path):
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


@contextmanager
def whole_file(path: Path | str) -> Iterator[Path]:
    """Yield the name of a new file beside `path`, with its ending, which takes its place once the block has written it.

    A block that fails leaves what was there before.

    Raises: OSError with the path, also where the disk is full.
    """
    path = Path(path)
    new = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    with naming(path):
        try:
            yield new
            os.replace(new, path)
        finally:
            new.unlink(missing_ok=True)


def unfinished(path: Path) -> Path:
    """The file that `path` is written to before it takes its place; a crash may leave it."""
    return path.with_name(f".{path.name}.new")


def remove(path: Path, ignore_errors: bool = False) -> None:
    """Remove a folder, or what somebody has put in its place: a file or a link, which is not followed.

    Raises: OSError, unless errors are ignored.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=ignore_errors)
        else:
            path.unlink(missing_ok=True)
    except OSError:
        if not ignore_errors:
            raise


def sync_folder(path: Path) -> None:
    """Bring a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path | str) -> Iterator[None]:
    """Let errors of a file bear its path: those of writing, such as a full disk's, have none."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise

"""Files: opened with care, parsed within bounds as JSON or TOML, and written whole or not at all.

Errors of writing name the file."""

import codecs
import errno
import json
import os
import re
import shutil
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

# ---- Files that a user has given: opened here alone, so that none is waited for, and none fills the memory


MOST_BYTES = 256 << 20
"""Bytes of a file that is read whole, at most: JSON, TOML, a template, a schedule, a table."""

MOST_LINE_BYTES = 64 << 20
"""Bytes of a line of JSON lines, at most."""

# What this process was given open may be a pipe: it was meant to be waited for.
_GIVEN_OPEN = ("/dev/stdin", "/dev/fd/", "/proc/self/fd/")
# What libraries read whole of a folder that they are given.
_READ_WHOLE = frozenset({".json", ".jinja", ".toml", ".txt", ".model"})


class UnfitFileError(OSError, ValueError):
    """A file that is not read: no regular one, too large, or no text. Also a ValueError, as other users' mistakes."""

    def __init__(self, path: Path | str, reason: str) -> None:
        super().__init__(errno.EINVAL, reason, str(path))

    def __str__(self) -> str:
        return f"{self.filename} is {self.strerror}"


def open_file(path: Path | str) -> BufferedReader:
    """Open a regular file for reading, or what the process was given open, such as /dev/stdin.

    Raises:
        UnfitFileError: it is a pipe, a socket or a device, whose content might never come or never end.
        OSError: it cannot be opened.
    """
    if str(path).startswith(_GIVEN_OPEN):
        return open(path, "rb")
    # Opened without waiting for somebody to write into a pipe.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_kind(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str) -> bytes:
    """Read a file whole.

    Raises:
        UnfitFileError: as `open_file`, or it has more than `MOST_BYTES`.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        _check_size(path, os.fstat(file.fileno()).st_size)
        content = file.read(MOST_BYTES + 1)
    _check_size(path, len(content))
    return content


def read_text(path: Path | str) -> str:
    """Read a file of UTF-8 whole, without a mark of its byte order.

    Raises: as `read_bytes`; UnfitFileError with the place of the first byte that is none of UTF-8.
    """
    return text_in(read_bytes(path), path)


def text_in(content: bytes, path: Path | str) -> str:
    """The text of a file's bytes. Raises: UnfitFileError, as `read_text`."""
    try:
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise UnfitFileError(path, f"not UTF-8 (byte {error.start}); convert it to UTF-8") from None


def lines_of(path: Path | str) -> Iterator[bytes]:
    """Yield the lines of a file, each with its end, the first without a mark of the bytes' order.

    Raises:
        UnfitFileError: as `open_file`, or a line has more than `MOST_LINE_BYTES`.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        if file.peek(3)[:3] == codecs.BOM_UTF8:
            file.read(3)
        while line := file.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                raise UnfitFileError(path, f"not read: a line has more than {MOST_LINE_BYTES >> 20} MiB")
            yield line


def check_file(path: Path | str) -> None:
    """Check a file that a library will open: as `open_file`, and where such files are read whole, as `read_bytes`.

    Raises:
        UnfitFileError: it is not to be opened.
    """
    try:
        found = os.stat(path)
    except OSError:
        return  # whoever opens it says so
    if not stat.S_ISDIR(found.st_mode):
        _check_kind(path, found)
        if Path(path).suffix in _READ_WHOLE:
            _check_size(path, found.st_size)


def refuse_used(folder: Path) -> None:
    """Refuse to write into a folder that holds something. Raises: ValueError."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already and was left as it is; give the name of a new folder")


def refuse_link_out(path: Path, folder: Path) -> None:
    """Refuse a file that is a link to a place outside a folder, which may itself be reached through links.

    Raises:
        ValueError: names the file, and where it leads.
    """
    # Unlike Path.resolve, it takes a link to itself for what it is: a file that is not there.
    target = Path(os.path.realpath(path))
    if path.is_symlink() and not target.is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link to {target}, outside the folder {folder}; put the file itself there")


def check_texts(folder: Path) -> None:
    """Check the files in a folder of which a library reads some whole. Raises: as `check_file`."""
    for path in sorted(folder.iterdir()):
        if path.suffix in _READ_WHOLE:
            check_file(path)


def _check_kind(path: Path | str, found: os.stat_result) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise UnfitFileError(path, "no regular file")


def _check_size(path: Path | str, size_bytes: int) -> None:
    if size_bytes > MOST_BYTES:
        raise UnfitFileError(path, f"larger than the {MOST_BYTES >> 20} MiB that are read")


# ---- Files that are there whole or not at all, and errors of writing that name the file


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


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder beside `path`, which takes its place once the block has filled it; a failed block leaves none.

    Raises: OSError with the path, also where the disk is full.
    """
    new = unfinished(path)
    with naming(path):
        shutil.rmtree(new, ignore_errors=True)
        try:
            new.mkdir()
            yield new
            os.replace(new, path)
            sync_folder(path.parent)
        finally:
            shutil.rmtree(new, ignore_errors=True)


def unfinished(path: Path) -> Path:
    """The file or folder that `path` is written to before it takes its place; a crash may leave it."""
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


# ---- JSON and TOML that a user may have written: parsed within bounds; a fault is one sentence


# Of lists and objects within each other: far beyond any file of ours, and far from where Python gives up.
_MAX_DEPTH = 100
_TOO_DEEP = "it is nested too deeply"
_NESTED = (list, dict)
_MOST_SHOWN = 40  # characters of a key


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: it is none, gives a key twice, is nested too deeply or has a number too long to be read.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    try:
        content = json.loads(text, object_pairs_hook=_with_each_key_once)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    brackets = (b"[", b"{") if isinstance(text, bytes) else ("[", "{")
    # Most texts have too few brackets to be deep, and counting is quick. Other encodings than UTF-8 have them, too.
    if sum(map(text.count, brackets)) > _MAX_DEPTH:  # pyright: ignore[reportArgumentType]
        check_depth(content)
    return content


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it gives the key {key[:_MOST_SHOWN]!r} twice; give it once")
    return found


def check_depth(content: Any) -> None:
    """Check that parsed values are not nested so deeply that a function which follows them might fail.

    Raises:
        ValueError: they are.
    """
    level = [content]
    for _ in range(_MAX_DEPTH):
        values = (value.values() if isinstance(value, dict) else value for value in level if isinstance(value, _NESTED))
        level = [inner for each in values for inner in each if isinstance(inner, _NESTED)]
    if level:
        raise ValueError(_TOO_DEEP)


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds a JSON object.

    Raises:
        ValueError: it holds anything else; names the file.
        OSError: it cannot be opened, or is none to be read whole.
    """
    read = read_bytes(path)
    try:
        content = parse_json(read)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a JSON object")
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none, or it is nested too deeply.

    >>> parse_toml("a = " + "[" * 100_000)
    Traceback (most recent call last):
    ValueError: it is nested too deeply
    """
    # Imported where it is used: most commands read none.
    import tomllib

    try:
        content = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    check_depth(content)
    return content


def toml_text(table: Mapping[str, Any], name: str = "") -> str:
    """Write a table of texts, truth values, numbers, lists and tables as TOML, its own values before the tables in it.

    Values that are None are left out.

    >>> print(toml_text({"a": {"b": 1e-3, "c d": [True, "e\\n"], "g": None}, "f": 2}), end="")
    f = 2
    <BLANKLINE>
    [a]
    b = 0.001
    "c d" = [true, "e\\n"]
    """
    table = {key: value for key, value in table.items() if value is not None}
    keys = {key: key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key) for key in table}
    lines = [f"{keys[key]} = {_toml_value(value)}\n" for key, value in table.items() if not isinstance(value, Mapping)]
    head = f"[{name}]\n" if name and (lines or not table) else ""
    inner = [
        toml_text(value, f"{name}.{keys[key]}" if name else keys[key])
        for key, value in table.items()
        if isinstance(value, Mapping)
    ]
    return "\n".join(part for part in (head + "".join(lines), *inner) if part)


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, float):
        return repr(value)  # inf and nan are words of TOML, too
    # JSON's texts, truth values and whole numbers are TOML's, but for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

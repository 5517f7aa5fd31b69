"""The files of a corpus and the documents in them, in an order that is the same on every machine."""

import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from penstock.io.files import lines_of, open_file, parse_json

BUILT_IN = "stdlib"
TEXT_ENDINGS = frozenset({".txt", ".text", ".md", ".rst", ".py"})
# with their builder's name in `datasets`
ROW_ENDINGS = {".jsonl": "json", ".ndjson": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
# Tables lie in many folders beside the texts that are meant, and `datasets` keeps its computations beside a dataset.
_BESIDE = re.compile(r"\.csv$|^cache-.*\.arrow$")
SPLITS_FILE = "dataset_dict.json"  # of a folder that `datasets` has saved with several splits
KNOWN_ENDINGS = ", ".join(sorted(TEXT_ENDINGS | ROW_ENDINGS.keys()))
# tests hold generated tables and broken encodings on purpose; packages differ from machine to machine
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


class CorpusError(ValueError):
    """A corpus is missing, empty, unreadable, or does not fit the model."""


class Row(NamedTuple):
    """A row of a file: its name as a document, its place for errors, and its value, an object unless by mistake."""

    name: str
    where: str
    value: Any


class EncodedDocument(NamedTuple):
    """A document's token ids, and for each whether a model learns to predict it; None where it learns all."""

    name: str
    tokens: np.ndarray
    learned: np.ndarray | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """The files of one corpus in order."""

    name: str
    root: Path
    files: tuple[Path, ...]
    text_field: str

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yield the name and the text of every document that is not empty, in order.

        A name is the file's path relative to the corpus, with the row's number if the file has rows.

        Raises: `CorpusError` for text that is not UTF-8, rows without the text field, or files that cannot be read.
        """
        for file in self.files:
            if file.suffix in TEXT_ENDINGS:
                texts = iter([(file.relative_to(self.root).as_posix(), self._text(file))])
            else:
                texts = ((row.name, self._text_of(row)) for row in self._rows(file))
            yield from ((name, text) for name, text in texts if text)

    def rows(self) -> Iterator[Row]:
        """Yield the rows of every file, in order; blank lines are none.

        Raises: `CorpusError` for a file without rows, one that cannot be read, or a line that is not JSON.
        """
        for file in self.files:
            if file.suffix in TEXT_ENDINGS:
                raise CorpusError(
                    f"{str(file)!r} has no rows; examples are in files that end in {', '.join(ROW_ENDINGS)}"
                )
            yield from self._rows(file)

    def holds_examples(self) -> bool:
        """True where the first row is an example, and not a text in the text field.

        Raises: `CorpusError` if it is a pair, from which only a reward model learns.
        """
        row = next(self.rows(), None) if self.files[0].suffix in ROW_ENDINGS else None
        if row is None or not isinstance(row.value, dict) or isinstance(row.value.get(self.text_field), str):
            return False
        if not {"messages", "completion"}.isdisjoint(row.value):
            return True
        if {"chosen", "rejected"} <= row.value.keys():
            raise CorpusError(
                f"{row.where}: is a pair, from which a reward model learns; give the folder of one as "
                "model.pretrained, or begin with examples/dpo.py"
            )
        return False

    def identity(self) -> str:
        """A hash of the names, sizes and times of the files, which stands for the documents without reading them."""
        stats = [(file, file.stat()) for file in self.files]
        listed = [(f.relative_to(self.root).as_posix(), s.st_size, s.st_mtime_ns) for f, s in stats]
        text = json.dumps([str(self.root), listed, self.text_field])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def _text(self, file: Path) -> str:
        try:
            with open_file(file) as text:
                return text.read().decode()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{str(file)!r} is not UTF-8 (byte {error.start}); convert it to UTF-8") from error
        except OSError as error:
            raise CorpusError(f"cannot read {str(file)!r}: {error.strerror}") from error

    def _text_of(self, row: Row) -> str:
        text = row.value.get(self.text_field) if isinstance(row.value, dict) else None
        if not isinstance(text, str):
            raise CorpusError(
                f"{row.where}: has no text in the field {self.text_field!r} but {str(row.value)[:60]!r}; "
                "examples have 'messages', or 'prompt' and 'completion'"
            )
        return text

    def _rows(self, file: Path) -> Iterator[Row]:
        name = file.relative_to(self.root).as_posix()
        # The library's reader of JSON takes texts like times for times, gives every row the fields of all, and names no
        # line in its errors.
        is_json = ROW_ENDINGS[file.suffix] == "json"
        values = ((f"line {n}", value) for n, value in json_lines(file)) if is_json else _table(file)
        for number, (place, value) in enumerate(values):
            yield Row(f"{name}:{number}", f"{file}, {place}", value)


def _table(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets

    kind = ROW_ENDINGS[file.suffix]
    # an empty text, and one such as "null", is a text
    how: dict[str, Any] = {"keep_default_na": False} if kind == "csv" else {}
    number = 0
    try:
        open_file(file).close()
        # streaming reads the file in place: nothing is copied into a cache, and ranks do not wait for each other
        rows = iter(datasets.load_dataset(kind, data_files=[str(file)], split="train", streaming=True, **how))
        while (row := next(rows, None)) is not None:
            yield f"row {number}", row
            number += 1
    except Exception as error:  # the readers below the library raise many unrelated types
        reason = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
        raise CorpusError(f"cannot read {str(file)!r} as {kind}: {reason[0]}") from error


def json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    """The value of each line of JSON of a file, with its number; blank lines are none.

    Raises: `CorpusError` for a file that cannot be read, or a line that is not JSON.
    """
    try:
        for number, line in enumerate(lines_of(file), 1):
            where = f"{file}, line {number}"
            try:
                if line.strip():
                    yield number, parse_json(line.decode())
            except UnicodeDecodeError as error:
                raise CorpusError(f"{where}: is not UTF-8 (byte {error.start}); convert it to UTF-8") from None
            except ValueError as error:
                reason = getattr(error, "msg", error)
                raise CorpusError(f"{where}: is not JSON ({reason}); a line is one JSON object") from None
    except OSError as error:
        raise CorpusError(f"cannot read {str(file)!r}: {error.strerror}") from error


def find_source(source: str, text_field: str = "text") -> Source:
    """Find the files of a corpus: the built-in one ("stdlib"), a file, a folder (recursively), or a pattern.

    A file of unknown ending is an error if it is named, and skipped if it is found; so is a .csv in a folder.

    Raises: `CorpusError` if there is nothing, nothing that can be read, or several splits.
    """
    if source == BUILT_IN:
        root = Path(sysconfig.get_path("stdlib"))
        files = tuple(path for path in _walk(root, SKIPPED_FOLDERS) if path.suffix == ".py")
        if not files:
            raise CorpusError("this Python comes without its library's source; give a corpus of your own")
        return Source(BUILT_IN, root, files, text_field)
    path = Path(source).expanduser()
    if path.is_file():
        if not _known(path):
            raise CorpusError(f"{source!r} has the ending {path.suffix!r}; a corpus ends in one of {KNOWN_ENDINGS}")
        return Source(source, path.parent, (path,), text_field)
    if path.is_dir():
        if (path / SPLITS_FILE).is_file():
            splits = ", ".join(sorted(repr(own.name) for own in path.iterdir() if own.is_dir()))
            raise CorpusError(f"{source!r} holds the splits {splits}; give the folder of one")
        root, found = path, [file for file in _walk(path) if not _BESIDE.search(file.name)]
    elif any(character in source for character in "*?["):
        parts = path.parts
        fixed = next(index for index, part in enumerate(parts) if any(character in part for character in "*?["))
        root = Path(*parts[:fixed])
        found = sorted(match for match in root.glob(str(Path(*parts[fixed:]))) if match.is_file())
    else:
        raise CorpusError(f"there is no corpus at {source!r}; give 'stdlib', a file, a folder, or a pattern with *")
    files = tuple(file for file in found if _known(file))
    if not files:
        raise CorpusError(f"no file of {source!r} ends in one of {KNOWN_ENDINGS}")
    return Source(source, root, files, text_field)


def _known(path: Path) -> bool:
    return path.suffix in TEXT_ENDINGS or path.suffix in ROW_ENDINGS


def _walk(root: Path, skipped: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files under a folder, sorted by relative path, independent of the file system."""

    def refuse(error: OSError) -> NoReturn:
        # A part of a corpus that may not be read is not left out without a word.
        raise error

    found = []
    for folder, names, files in os.walk(root, onerror=refuse):
        names[:] = [name for name in names if name not in skipped and not name.startswith(".")]
        found.extend(Path(folder, file) for file in files if not file.startswith("."))
    return iter(sorted(found, key=lambda path: path.relative_to(root).as_posix()))

"""A corpus: text tokenised once into compact stores, divided into training and validation by document.

Shape suffixes: T tokens of all documents end to end.
"""

import fcntl
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.data.examples import ExampleReader, PairReader
from penstock.data.packed import NO_LABEL
from penstock.data.sources import ROW_ENDINGS, CorpusError, EncodedDocument, Source, find_source
from penstock.data.tokenizer import TokenizationError, Tokenizer, ended, load_tokenizer, own_end_token
from penstock.io.files import naming, read_json_object, whole_folder
from penstock.settings import DataConfig

SIDES = ("training", "validation")
CACHE_FORMAT = 2  # to be raised whenever the same text would be stored differently
DOCUMENTS_AT_ONCE = 256
SECONDS_BETWEEN_NOTES = 2.0
TOKEN_FILE, LEARNED_FILE = "tokens.bin", "learned.bin"

_logger = logging.getLogger(__name__)


# ---- The tokens end to end, in memory or in memory-mapped files, and which of them are learned


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents' tokens end to end; nothing is copied out of a memory map before it is used.

    tokens: [T] unsigned, as narrow as the vocabulary allows. offsets: int64 [documents + 1], the first token of each
    document and the end; strictly increasing, since no document is empty. max_token: the largest id that occurs.
    fingerprint: a hash of tokens, boundaries and what is learned. learned: bool [T], the tokens that a model learns to
    predict, so that they are labels; None for all.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    max_token: int
    fingerprint: str
    learned: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """The number of documents, none of them empty."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def labels(self, places: np.ndarray | slice) -> np.ndarray:
        """The tokens at these places as labels, int64: their ids, or `NO_LABEL` where they are not learned."""
        labels = self.tokens[places].astype(np.int64)
        if self.learned is not None:
            labels[~self.learned[places]] = NO_LABEL
        return labels

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `CorpusError` if a token does not fit a model's vocabulary."""
        if self.max_token >= vocab_size:
            position = int(np.argmax(self.tokens >= vocab_size))
            document = int(np.searchsorted(self.offsets, position, "right")) - 1
            raise CorpusError(
                f"{self.name} holds token {int(self.tokens[position])} in document {document}, "
                f"outside the model's vocabulary of {vocab_size}; vocab_size must be at least {self.max_token + 1}"
            )

    def part(self, name: str, first: int, last: int) -> "TokenStore":
        """A store of the tokens from `first` up to `last`; documents are cut where they cross an end."""
        inner = self.offsets[(self.offsets > first) & (self.offsets < last)]
        offsets = np.concatenate([[first], inner, [last]]).astype(np.int64) - first
        tokens = self.tokens[first:last]
        fingerprint = hashlib.blake2b(f"{self.fingerprint} {first} {last}".encode(), digest_size=16).hexdigest()
        learned = None if self.learned is None else self.learned[first:last]
        return TokenStore(name, tokens, offsets, int(tokens.max()), fingerprint, learned)


class StoreWriter:
    """Writes documents one after another into a folder's files, or in memory where it is None.

    marks_learned: documents say what is learned of them.
    """

    #: the least type that has room for every token
    _dtype: np.dtype[Any]
    #: the folder, which is made
    _folder: Path | None
    #: where tokens are written, and where a byte for each token, 1 where it is learned
    _streams: list[BinaryIO]
    #: tokens of each document so far
    _lengths: list[int]
    #: the largest token so far
    _max_token: int
    #: hash of what was written so far
    _hash: Any

    def __init__(self, vocab_size: int, marks_learned: bool, folder: Path | None) -> None:
        self._dtype = np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._folder, self._lengths, self._max_token = folder, [], -1
        if folder is not None:
            folder.mkdir()
        names = (TOKEN_FILE, LEARNED_FILE) if marks_learned else (TOKEN_FILE,)
        self._streams = [BytesIO() if folder is None else (folder / name).open("wb") for name in names]
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, documents: Iterable[EncodedDocument]) -> None:
        """Append documents, except those without tokens."""
        for _, tokens, learned in documents:
            if not len(tokens):
                continue
            columns = [tokens.astype(self._dtype, copy=False)]
            if len(self._streams) > 1:
                assert learned is not None and len(learned) == len(tokens)
                columns.append(learned.astype(np.bool_, copy=False))
            for stream, column in zip(self._streams, columns, strict=True):
                content = column.tobytes()
                with naming(self._folder or "memory"):
                    stream.write(content)
                self._hash.update(content)
            self._lengths.append(len(tokens))
            self._max_token = max(self._max_token, int(tokens.max()))

    def finish(self, name: str) -> TokenStore:
        """The store of all documents; that of a folder has its tokens there alone, where `load_store` maps them."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64)
        self._hash.update(self._dtype.str.encode() + offsets.tobytes())
        written = [stream.getvalue() if isinstance(stream, BytesIO) else b"" for stream in self._streams]
        columns = map(np.frombuffer, written, (self._dtype, np.dtype(np.bool_)))
        tokens, learned = next(columns), next(columns, None)
        self.close()
        if self._folder is not None:
            np.save(self._folder / "offsets.npy", offsets)
            facts = {"dtype": self._dtype.str, "max_token": self._max_token, "fingerprint": self._hash.hexdigest()}
            (self._folder / "store.json").write_text(json.dumps(facts))
        return TokenStore(name, tokens, offsets, self._max_token, self._hash.hexdigest(), learned)

    def close(self) -> None:
        """Close the files; again, does nothing."""
        for stream in self._streams:
            stream.close()


def load_store(name: str, folder: Path) -> TokenStore:
    """Load a store from its folder, its tokens as a memory map.

    Raises: `CorpusError` if files are missing, or their sizes contradict each other.
    """

    def mapped(file: str, dtype: np.dtype[Any]) -> np.ndarray:
        # an empty file cannot be mapped
        values = np.memmap(folder / file, dtype=dtype, mode="r") if offsets[-1] else np.empty(0, dtype)
        if len(values) != offsets[-1]:
            raise ValueError(f"{len(values)} tokens where {offsets[-1]} are expected")
        return values

    try:
        facts = read_json_object(folder / "store.json")
        offsets = np.load(folder / "offsets.npy")
        tokens = mapped(TOKEN_FILE, np.dtype(facts["dtype"]))
        learned = mapped(LEARNED_FILE, np.dtype(np.bool_)) if (folder / LEARNED_FILE).is_file() else None
        return TokenStore(name, tokens, offsets, facts["max_token"], facts["fingerprint"], learned)
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CorpusError(f"the token cache {str(folder)!r} is damaged ({error}); delete it to make it anew") from error


@dataclass(frozen=True, slots=True)
class CorpusSpec:
    """The text of a corpus by the settings, and what the model makes of it.

    ends_rows: without an end token, rows of text end with the tokenizer's own as well, as in TRL. max_example_tokens:
    the most tokens of an example (`ExampleReader`). pairs: rows are pairs of texts, for a reward model whose padding is
    `pad_token` (`PairReader`).
    """

    data: DataConfig = DataConfig()
    max_example_tokens: int | None = None
    ends_rows: bool = False
    pairs: bool = False
    pad_token: int | None = None


@dataclass(frozen=True, slots=True)
class Corpus:
    """Both sides of a corpus, the same on every rank; `validation` is None if nothing is kept for it."""

    training: TokenStore
    validation: TokenStore | None
    vocab_size: int

    @property
    def fingerprint(self) -> str:
        """A hash of every token on both sides, to compare between ranks."""
        return f"{self.training.fingerprint}-{self.validation.fingerprint if self.validation else None}"

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `CorpusError` if a token of either side does not fit a model's vocabulary."""
        for store in (self.training, self.validation):
            if store is not None:
                store.check_vocabulary(vocab_size)


@dataclass(frozen=True, slots=True)
class TextReader:
    """Reads each document as a text, all of whose tokens are learned; it ends with `end`, if there is such a token."""

    tokenizer: Tokenizer
    end: str | None = None
    #: True where documents say which of their tokens are learned; the number of documents that stay together
    marks_learned, documents_per_item = False, 1

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint + (f"-{self.end}" if self.end else "")

    def read(self, source: Source) -> Iterator[list[EncodedDocument]]:
        """Yield the source's texts, tokenised."""
        documents = source.documents()
        while some := list(islice(documents, DOCUMENTS_AT_ONCE)):
            try:
                encoded = self.tokenizer.encode([ended(text, self.end) for _, text in some])
            except TokenizationError as error:
                raise CorpusError(f"{source.name}, {some[0][0]} to {some[-1][0]}: {error}") from None
            yield [EncodedDocument(name, tokens) for (name, _), tokens in zip(some, encoded, strict=True)]


Reader = TextReader | ExampleReader


def load_corpus(spec: CorpusSpec, cache_folder: Path | str | None = None) -> Corpus:
    """Tokenise a corpus in memory, or once for all ranks and runs into a cache folder that is then memory-mapped.

    Raises: `CorpusError` if it is missing, empty, unreadable, or of an unknown kind.
    """
    data = spec.data
    source = find_source(data.corpus, data.text_field)
    # Both are found before either is read.
    other = None if data.validation_corpus is None else find_source(data.validation_corpus, data.text_field)
    reader, fraction = _reader(spec, source), data.validation_fraction if other is None else 0.0
    training, validation = _stores(source, reader, fraction, cache_folder)
    if other is not None:
        return Corpus(training, _stores(other, _reader(spec, other), 0.0, cache_folder)[0], reader.vocab_size)
    if fraction == 0:
        return Corpus(training, None, reader.vocab_size)
    if not (training.num_tokens and validation.num_tokens):
        whole = training if training.num_tokens else validation
        training, validation = _cut(whole, fraction, reader.documents_per_item)
    return Corpus(training, validation, reader.vocab_size)


def _reader(spec: CorpusSpec, source: Source) -> Reader:
    """The reader of the kind of rows that the source begins with."""
    data = spec.data
    if spec.pairs or source.holds_examples():
        arguments = data.tokenizer or "bytes", spec.max_example_tokens, data.end_token, data.special_tokens
        return PairReader.load(*arguments, pad_token=spec.pad_token) if spec.pairs else ExampleReader.load(*arguments)
    tokenizer = load_tokenizer(data.tokenizer, data.end_token)
    ends = spec.ends_rows and not data.end_token and source.files[0].suffix in ROW_ENDINGS
    end = own_end_token(data.tokenizer) if ends else None
    return TextReader(tokenizer if data.special_tokens else tokenizer.without_special_tokens(), end)


def held_out(name: str, fraction: float) -> bool:
    """Return whether a document is kept for validation; a hash of its name decides, alike on every machine."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return number < fraction * 2**64


def _cut(store: TokenStore, fraction: float, documents_per_item: int) -> tuple[TokenStore, TokenStore]:
    """Cut a store whose documents all fell on one side; the last ones, or the end of the only one, are held out."""
    num_items = store.num_documents // documents_per_item
    if store.num_tokens < 2:
        raise CorpusError(f"{store.name} holds {store.num_tokens} tokens: too few to keep some for validation")
    if num_items == 1 and store.learned is not None:
        raise CorpusError(f"{store.name} holds one example; for validation give another file, or a fraction of 0")
    if num_items > 1:
        num_kept = min(max(1, round(fraction * num_items)), num_items - 1)
        border = int(store.offsets[(num_items - num_kept) * documents_per_item])
    else:
        border = min(max(1, round((1 - fraction) * store.num_tokens)), store.num_tokens - 1)
    name = store.name.rsplit(" (", 1)[0]
    training = store.part(f"{name} (training)", 0, border)
    return training, store.part(f"{name} (validation)", border, store.num_tokens)


def _stores(
    source: Source, reader: Reader, fraction: float, cache_folder: Path | str | None
) -> tuple[TokenStore, TokenStore]:
    """The training and the validation side, one of which may be empty; from the cache, which is filled if needed."""
    names = [f"the corpus {source.name!r} ({side})" for side in SIDES]
    if cache_folder is None:
        training, validation = _write(source, reader, fraction, names, None)
    else:
        key = json.dumps([CACHE_FORMAT, source.identity(), reader.fingerprint, fraction])
        folder = Path(cache_folder) / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
        folder.parent.mkdir(parents=True, exist_ok=True)
        # the first process tokenises; the system drops the lock of a process that dies
        with folder.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                with whole_folder(folder) as new:
                    _write(source, reader, fraction, names, new)
        training, validation = (load_store(name, folder / side) for name, side in zip(names, SIDES, strict=True))
    if training.num_tokens + validation.num_tokens == 0:
        raise CorpusError(f"the corpus {source.name!r} is empty: no text in any of its {len(source.files)} files")
    return training, validation


def _write(
    source: Source, reader: Reader, fraction: float, names: list[str], folder: Path | None
) -> tuple[TokenStore, TokenStore]:
    """Tokenise the source, each document into the store of its side: into a folder, or in memory."""
    with ExitStack() as stack:
        training, validation = (
            stack.enter_context(
                closing(StoreWriter(reader.vocab_size, reader.marks_learned, None if folder is None else folder / side))
            )
            for side in SIDES
        )
        num_documents, logged_s = 0, time.monotonic()
        for some in reader.read(source):
            num_documents += len(some)
            if time.monotonic() - logged_s >= SECONDS_BETWEEN_NOTES:
                logged_s = time.monotonic()
                _logger.info(f"tokenising {source.name}: {num_documents:,} documents, up to {some[-1].name}")
            kept = [held_out(document.name, fraction) for document in some]
            training.add(document for document, out in zip(some, kept, strict=True) if not out)
            validation.add(document for document, out in zip(some, kept, strict=True) if out)
        return training.finish(names[0]), validation.finish(names[1])

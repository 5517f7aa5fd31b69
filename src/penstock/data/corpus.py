"""A corpus: text tokenised once into compact stores, divided into training and validation by document."""

import hashlib
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from penstock.data.checks import CorpusError
from penstock.data.sources import BUILT_IN, Document, Source, find_source
from penstock.data.tokenizer import Tokenizer, WithoutSpecialTokens, load_tokenizer
from penstock.settings.json_files import read_json_object

SIDES = ("training", "validation")
CACHE_FORMAT = 2  # to be raised whenever the same text would be stored differently
DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Documents' tokens end to end; nothing is copied out of a memory map before it is used.

    tokens: [T] unsigned, as narrow as the vocabulary allows. offsets: int64 [documents + 1], the first token of each
    document and the end; strictly increasing, since no document is empty. max_token: the largest id that occurs.
    fingerprint: a hash of tokens and boundaries.
    """

    name: str
    tokens: np.ndarray
    offsets: np.ndarray
    max_token: int
    fingerprint: str

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all documents."""
        return int(self.offsets[-1])

    @property
    def num_documents(self) -> int:
        """The number of documents, none of them empty."""
        return len(self.offsets) - 1

    def document(self, index: int) -> np.ndarray:
        """The tokens of one document."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

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
        return TokenStore(name, tokens, offsets, int(tokens.max()), fingerprint)


class StoreWriter:
    """Writes documents' tokens one after another to a binary stream, which the caller owns."""

    #: the least type that has room for every token
    dtype: np.dtype[Any]
    #: where tokens are written
    _stream: BinaryIO
    #: tokens of each document so far
    _lengths: list[int]
    #: the largest token so far
    _max_token: int
    #: hash of what was written so far
    _hash: Any

    def __init__(self, stream: BinaryIO, vocab_size: int):
        self.dtype = np.dtype(np.uint8 if vocab_size <= 1 << 8 else np.uint16 if vocab_size <= 1 << 16 else np.uint32)
        self._stream = stream
        self._lengths = []
        self._max_token = -1
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, documents: Iterable[np.ndarray]) -> None:
        """Append documents, except those without tokens."""
        for tokens in documents:
            if len(tokens):
                content = tokens.astype(self.dtype, copy=False).tobytes()
                self._stream.write(content)
                self._hash.update(content)
                self._lengths.append(len(tokens))
                self._max_token = max(self._max_token, int(tokens.max()))

    def finish(self, name: str, tokens: np.ndarray) -> TokenStore:
        """Make the store over `tokens`, which the caller has mapped from the stream's content."""
        offsets = np.concatenate([[0], np.cumsum(self._lengths, dtype=np.int64)]).astype(np.int64)
        self._hash.update(self.dtype.str.encode() + offsets.tobytes())
        return TokenStore(name, tokens, offsets, self._max_token, self._hash.hexdigest())


def save_index(store: TokenStore, folder: Path) -> None:
    """Write the boundaries and facts that `load_store` needs beside the token file."""
    np.save(folder / "offsets.npy", store.offsets)
    facts = {"dtype": store.tokens.dtype.str, "max_token": store.max_token, "fingerprint": store.fingerprint}
    (folder / "store.json").write_text(json.dumps(facts))


def load_store(name: str, folder: Path) -> TokenStore:
    """Load a store from its folder, its tokens as a memory map.

    Raises: `CorpusError` if files are missing, or their sizes contradict each other.
    """
    try:
        facts = read_json_object(folder / "store.json")
        offsets = np.load(folder / "offsets.npy")
        dtype = np.dtype(facts["dtype"])
        # an empty file cannot be mapped
        tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r") if offsets[-1] else np.empty(0, dtype)
        if len(tokens) != offsets[-1]:
            raise ValueError(f"{len(tokens)} tokens where {offsets[-1]} are expected")
        return TokenStore(name, tokens, offsets, facts["max_token"], facts["fingerprint"])
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise CorpusError(f"the token cache {str(folder)!r} is damaged ({error}); delete it to make it anew") from error


@dataclass(frozen=True, slots=True)
class CorpusSpec:
    """The text of a corpus, its tokenizer, and the part kept for validation.

    source, validation_source: "stdlib" (the source of Python's own standard library), a file, a folder, or a pattern;
    text, JSONL or Parquet. validation_fraction: the part of the documents kept for validation, chosen by a hash of
    their names; unused if validation has its own source. tokenizer: "bytes", a tokenizer.json or its folder.
    end_token: the token put after every document (its text; for bytes True), False for none. special_tokens: with
    those that the tokenizer itself puts around a text.
    """

    source: str = BUILT_IN
    validation_source: str | None = None
    validation_fraction: float = 0.1
    text_field: str = "text"
    tokenizer: str = "bytes"
    end_token: str | bool = False
    special_tokens: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise CorpusError(f"validation_fraction is {self.validation_fraction}; it must be at least 0 and below 1")


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


def load_corpus(spec: CorpusSpec, cache_folder: Path | str | None = None) -> Corpus:
    """Tokenise a corpus in memory, or once for all ranks and runs into a cache folder that is then memory-mapped.

    Raises: `CorpusError` if it is missing, empty, unreadable, or of an unknown kind.
    """
    tokenizer = load_tokenizer(spec.tokenizer, spec.end_token)
    if not spec.special_tokens:
        tokenizer = WithoutSpecialTokens(tokenizer)
    source = find_source(spec.source, spec.text_field)
    if spec.validation_source is not None:
        # find both before reading either
        other = find_source(spec.validation_source, spec.text_field)
        training, _ = _stores(source, tokenizer, 0.0, cache_folder)
        return Corpus(training, _stores(other, tokenizer, 0.0, cache_folder)[0], tokenizer.vocab_size)
    training, validation = _stores(source, tokenizer, spec.validation_fraction, cache_folder)
    if spec.validation_fraction == 0:
        return Corpus(training, None, tokenizer.vocab_size)
    if not (training.num_tokens and validation.num_tokens):
        training, validation = _cut(training if training.num_tokens else validation, spec.validation_fraction)
    return Corpus(training, validation, tokenizer.vocab_size)


def held_out(name: str, fraction: float) -> bool:
    """Return whether a document is kept for validation; a hash of its name decides, alike on every machine."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return number < fraction * 2**64


def _cut(store: TokenStore, fraction: float) -> tuple[TokenStore, TokenStore]:
    """Cut a store whose documents all fell on one side; the last ones, or the end of the only one, are held out."""
    if store.num_tokens < 2:
        raise CorpusError(f"{store.name} holds {store.num_tokens} tokens: too few to keep some for validation")
    if store.num_documents > 1:
        num_kept = min(max(1, round(fraction * store.num_documents)), store.num_documents - 1)
        border = int(store.offsets[store.num_documents - num_kept])
    else:
        border = min(max(1, round((1 - fraction) * store.num_tokens)), store.num_tokens - 1)
    name = store.name.rsplit(" (", 1)[0]
    training = store.part(f"{name} (training)", 0, border)
    return training, store.part(f"{name} (validation)", border, store.num_tokens)


def _stores(
    source: Source, tokenizer: Tokenizer, fraction: float, cache_folder: Path | str | None
) -> tuple[TokenStore, TokenStore]:
    """The training and the validation side, one of which may be empty."""
    first, second = _cached(source, tokenizer, fraction, cache_folder)
    if first.num_tokens + second.num_tokens == 0:
        raise CorpusError(f"the corpus {source.name!r} is empty: no text in any of its {len(source.files)} files")
    return first, second


def _cached(
    source: Source, tokenizer: Tokenizer, fraction: float, cache_folder: Path | str | None
) -> tuple[TokenStore, TokenStore]:
    """Both sides from the cache, which is filled first if needed; without a cache, made in memory."""
    names = [f"the corpus {source.name!r} ({side})" for side in SIDES]
    if cache_folder is None:
        streams = [io.BytesIO() for _ in SIDES]
        writers = _write(source.documents(), tokenizer, fraction, streams)
        first, second = (
            writer.finish(name, np.frombuffer(stream.getvalue(), dtype=writer.dtype))
            for name, writer, stream in zip(names, writers, streams, strict=True)
        )
        return first, second
    import filelock

    key = json.dumps([CACHE_FORMAT, source.identity(), tokenizer.fingerprint, fraction])
    folder = Path(cache_folder) / hashlib.blake2b(key.encode(), digest_size=12).hexdigest()
    folder.parent.mkdir(parents=True, exist_ok=True)
    # the first process tokenises; the system drops the lock of a process that dies
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _fill_cache(folder, source, tokenizer, fraction)
    first, second = (load_store(name, folder / side) for name, side in zip(names, SIDES, strict=True))
    return first, second


def _fill_cache(folder: Path, source: Source, tokenizer: Tokenizer, fraction: float) -> None:
    """Tokenise into a folder that appears complete or not at all; the caller holds the lock."""
    for abandoned in folder.parent.glob(f"{folder.name}.*.partial"):  # of a process that was killed
        shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", suffix=".partial", dir=folder.parent))
    try:
        for side in SIDES:
            (partial / side).mkdir()
        with ExitStack() as stack:
            streams = [stack.enter_context((partial / side / "tokens.bin").open("wb")) for side in SIDES]
            writers = _write(source.documents(), tokenizer, fraction, streams)
        for side, writer in zip(SIDES, writers, strict=True):
            save_index(writer.finish(side, np.empty(0, writer.dtype)), partial / side)
        os.rename(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write(
    documents: Iterable[Document], tokenizer: Tokenizer, fraction: float, streams: list
) -> tuple[StoreWriter, StoreWriter]:
    """Tokenise documents in groups, each document to the stream of its side."""
    training, validation = (StoreWriter(stream, tokenizer.vocab_size) for stream in streams)
    for some in _groups(documents):
        encoded = tokenizer.encode([document.text for document in some])
        kept = [held_out(document.name, fraction) for document in some]
        training.add(tokens for tokens, out in zip(encoded, kept, strict=True) if not out)
        validation.add(tokens for tokens, out in zip(encoded, kept, strict=True) if out)
    return training, validation


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    iterator = iter(documents)
    while some := list(islice(iterator, DOCUMENTS_AT_ONCE)):
        yield some

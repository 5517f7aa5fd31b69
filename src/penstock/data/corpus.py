"""A corpus: text, tokenised once, divided into training and validation by document."""

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

import numpy as np

from penstock.data.errors import CorpusError
from penstock.data.sources import BUILT_IN, Document, Source, find_source
from penstock.data.store import StoreWriter, TokenStore, load_store, save_index
from penstock.data.tokenizer import Tokenizer, load_tokenizer

SIDES = ("training", "validation")
CACHE_FORMAT = 1  # to be raised whenever the same text would be stored otherwise
DOCUMENTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class CorpusSpec:
    """Which text, how tokenised, and what of it is kept for validation.

    source, validation_source: "stdlib" (the source of Python's own standard library), a file, a folder, or a pattern;
    text, JSONL or Parquet. validation_fraction: the part of the documents kept for validation, chosen by a hash of
    their names; unused where validation has a source of its own. tokenizer: "bytes", a tokenizer.json or its folder.
    end_token: the token put after every document (its text; for bytes True), False for none.
    """

    source: str = BUILT_IN
    validation_source: str | None = None
    validation_fraction: float = 0.1
    text_field: str = "text"
    tokenizer: str = "bytes"
    end_token: str | bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.validation_fraction < 1:
            raise CorpusError(f"validation_fraction is {self.validation_fraction}; it must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class Corpus:
    """Both sides of a corpus; `validation` is None where nothing is kept for it. The same on every rank."""

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
    """The corpus, tokenised; in memory, or once for all ranks and runs in a cache folder, from where it is mapped.

    Raises: `CorpusError` if it is missing, empty, unreadable, or of an unknown kind.
    """
    tokenizer = load_tokenizer(spec.tokenizer, spec.end_token)
    source = find_source(spec.source, spec.text_field)
    if spec.validation_source is not None:
        # both are looked for before either is read
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
    """Whether a document is kept for validation: by a hash of its name alone, so that every machine decides alike."""
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
    return number < fraction * 2**64


def _cut(store: TokenStore, fraction: float) -> tuple[TokenStore, TokenStore]:
    """Two stores of one whose documents all fell on one side: the last ones, or the end of the only one, held out."""
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
    """Training and validation side, one of which may be empty."""
    first, second = _cached(source, tokenizer, fraction, cache_folder)
    if first.num_tokens + second.num_tokens == 0:
        raise CorpusError(f"the corpus {source.name!r} is empty: no text in any of its {len(source.files)} files")
    return first, second


def _cached(
    source: Source, tokenizer: Tokenizer, fraction: float, cache_folder: Path | str | None
) -> tuple[TokenStore, TokenStore]:
    """Both sides from the cache if one is given, which is filled first where need be; else made in memory."""
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
    # whoever comes first tokenises; the system drops the lock of a process that dies
    with filelock.FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            _fill_cache(folder, source, tokenizer, fraction)
    first, second = (load_store(name, folder / side) for name, side in zip(names, SIDES, strict=True))
    return first, second


def _fill_cache(folder: Path, source: Source, tokenizer: Tokenizer, fraction: float) -> None:
    """Tokenise into a folder that appears whole or not at all; the caller holds the lock."""
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
    """Tokenise documents, some at a time, each to the stream of its side."""
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

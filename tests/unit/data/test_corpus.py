"""Corpora: found, read, tokenised once, divided by document; and every mistake told in one sentence."""

import json
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.data import CorpusError, load_corpus
from penstock.data.corpus import TokenStore, held_out
from penstock.data.sources import SKIPPED_FOLDERS, find_source
from penstock.data.tokenizer import load_tokenizer
from penstock.io.files import unfinished
from tests.unit.data.corpora import corpus_spec

ROWS = ["one small step", "für die Menschheit", "a giant leap", "x"] * 10


def texts_of(store: TokenStore) -> list[str]:
    return [bytes(store.document(i).astype(np.uint8)).decode() for i in range(store.num_documents)]


def write_rows(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix in (".arrow", ".csv"):
        import datasets

        made = datasets.Dataset.from_list(rows)
        if path.suffix == ".csv":
            made.to_csv(str(path))
        else:
            made.save_to_disk(str(path.parent / "saved"))
            (path.parent / "saved" / "data-00000-of-00001.arrow").rename(path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A word-level tokenizer with an end token and an id far above the number of tokens."""
    import tokenizers

    words = {"[UNK]": 0, "<end>": 1, "one": 2, "small": 3, "step": 4, "leap": 300}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


# ---- the built-in corpus


def test_the_built_in_corpus_is_the_librarys_source_divided_by_file():
    corpus = load_corpus(corpus_spec())
    assert corpus.validation is not None
    source = find_source("stdlib")
    names = [file.relative_to(source.root).as_posix() for file in source.files]
    assert names == sorted(names)
    assert not any(part in SKIPPED_FOLDERS for name in names for part in Path(name).parts)
    known = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    sides = {True: corpus.validation, False: corpus.training}
    assert known in texts_of(sides[held_out("argparse.py", 0.1)])
    assert corpus.training.num_documents > 5 * corpus.validation.num_documents > 0
    assert corpus.vocab_size == 256
    assert corpus.training.tokens.dtype == np.uint8
    assert corpus.training.num_tokens == corpus.training.tokens.size > 1_000_000


# ---- users' corpora


def test_text_files_are_documents_in_order_of_their_paths(tmp_path: Path):
    texts = {f"{name}.txt": f"text {name}\r\n" for name in "qwertyuiopasdfghjklzxcvbnm"}
    texts["inner/deep.md"] = "deep"
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "empty.txt").touch()
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe")
    (tmp_path / ".hidden.txt").write_text("hidden")
    corpus = load_corpus(corpus_spec(corpus=str(tmp_path), validation_fraction=0.3))
    assert corpus.validation is not None
    for held, store in ((False, corpus.training), (True, corpus.validation)):
        assert texts_of(store) == [texts[name] for name in sorted(texts) if held_out(name, 0.3) == held]
    one = load_corpus(corpus_spec(corpus=str(tmp_path / "inner/*.md"), validation_fraction=0))
    assert texts_of(one.training) == ["deep"] and one.validation is None


@pytest.mark.parametrize("ending", [".jsonl", ".ndjson", ".parquet", ".arrow", ".csv"])
def test_rows_are_documents(tmp_path: Path, ending: str):
    rows = [{"number": number, "body": text} for number, text in enumerate(ROWS)]
    path = write_rows(tmp_path / f"rows{ending}", [*rows, {"number": 99, "body": ""}])
    corpus = load_corpus(corpus_spec(corpus=str(path), text_field="body", validation_fraction=0.2))
    assert corpus.validation is not None
    for held, store in ((False, corpus.training), (True, corpus.validation)):
        assert store.num_documents > 0
        kept = [text for number, text in enumerate(ROWS) if held_out(f"rows{ending}:{number}", 0.2) == held]
        assert texts_of(store) == kept


def test_lines_of_json_are_read_as_they_are_written(tmp_path: Path):
    rows = [{"text": "2020-01-01T00:00:00Z"}, {"text": "2021-01-01T00:00:00Z", "more": {"b": 1, "a": None}}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    # a reader that seeks a common type for all rows makes times of these texts, and adds fields
    assert [row.value for row in find_source(str(path)).rows()] == rows
    assert [text for _, text in find_source(str(path)).documents()] == [row["text"] for row in rows]


def test_a_single_document_is_cut_for_validation(tmp_path: Path):
    path = tmp_path / "one.txt"
    path.write_text("0123456789" * 10)
    corpus = load_corpus(corpus_spec(corpus=str(path), validation_fraction=0.2))
    assert corpus.validation is not None
    assert texts_of(corpus.training) + texts_of(corpus.validation) == ["0123456789" * 8, "0123456789" * 2]


def test_some_of_few_documents_are_kept_for_validation(tmp_path: Path):
    names = [name for name in map(str, range(100)) if not held_out(f"{name}.txt", 0.1)][:3]
    for name in names:
        (tmp_path / f"{name}.txt").write_text(f"text {name}")
    corpus = load_corpus(corpus_spec(corpus=str(tmp_path), validation_fraction=0.1))
    assert corpus.validation is not None
    assert corpus.training.num_documents == 2 and corpus.validation.num_documents == 1
    assert texts_of(corpus.training) + texts_of(corpus.validation) == [f"text {name}" for name in sorted(names)]


def test_validation_may_have_a_source_of_its_own(tmp_path: Path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 3)
    spec = corpus_spec(corpus=str(tmp_path / "a.txt"), validation_corpus=str(tmp_path / "b.txt"))
    corpus = load_corpus(spec)
    assert corpus.validation is not None
    assert (texts_of(corpus.training), texts_of(corpus.validation)) == (["aaa"], ["bbb"])


# ---- tokenizers


def test_bytes_may_end_documents_with_a_token_of_their_own(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ä")
    corpus = load_corpus(corpus_spec(corpus=str(tmp_path / "a.txt"), validation_fraction=0, end_token="end"))
    assert corpus.training.tokens.tolist() == [0xC3, 0xA4, 256]
    assert corpus.vocab_size == 257


def test_any_tokenizer_file_can_be_used_and_never_truncates(tmp_path: Path, tokenizer_file: Path):
    path = write_rows(tmp_path / "a.jsonl", [{"text": "one small step"}, {"text": "one leap one leap"}])
    spec = corpus_spec(corpus=str(path), validation_fraction=0, tokenizer=str(tokenizer_file), end_token="<end>")
    corpus = load_corpus(spec)
    assert [corpus.training.document(i).tolist() for i in (0, 1)] == [[2, 3, 4, 1], [2, 300, 2, 300, 1]]
    assert corpus.vocab_size == 301
    assert corpus.training.tokens.dtype == np.uint16
    folder = load_tokenizer(str(tokenizer_file.parent), "<end>")
    assert folder.fingerprint == load_tokenizer(str(tokenizer_file), "<end>").fingerprint
    assert folder.fingerprint != load_tokenizer(str(tokenizer_file)).fingerprint


# ---- the cache


def assert_same_corpus(one, other):
    assert one.fingerprint == other.fingerprint
    for a, b in ((one.training, other.training), (one.validation, other.validation)):
        assert a.tokens.dtype == b.tokens.dtype
        assert np.array_equal(a.tokens, b.tokens)
        assert np.array_equal(a.offsets, b.offsets)
        assert (a.name, a.max_token) == (b.name, b.max_token)


def test_a_cached_corpus_is_tokenised_once_and_equals_one_in_memory(tmp_path: Path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in ROWS])
    spec, cache = corpus_spec(corpus=str(path)), tmp_path / "cache"
    first = load_corpus(spec, cache)
    assert_same_corpus(first, load_corpus(spec))
    with monkeypatch.context() as patch:
        patch.setattr("penstock.data.corpus._write", None)  # any attempt to tokenise fails
        second = load_corpus(spec, cache)
    assert isinstance(second.training.tokens, np.memmap)
    assert_same_corpus(first, second)
    write_rows(path, [{"text": text} for text in [*ROWS, "more", "and more"]])
    third = load_corpus(spec, cache)
    assert third.fingerprint != first.fingerprint
    assert_same_corpus(third, load_corpus(spec))
    assert not list(cache.glob(".*"))


def test_a_failed_or_damaged_cache_is_not_used(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "good"}, {"other": "bad"}])
    cache = tmp_path / "cache"
    with pytest.raises(CorpusError, match="line 2"):
        load_corpus(corpus_spec(corpus=str(path)), cache)
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == []
    write_rows(path, [{"text": text} for text in ROWS])
    load_corpus(corpus_spec(corpus=str(path)), cache)
    folder = next(cache.glob("*/training")).parent
    shutil.rmtree(folder)
    unfinished(folder).mkdir()  # of a process that was killed
    load_corpus(corpus_spec(corpus=str(path)), cache)
    assert [entry for entry in cache.iterdir() if entry.is_dir()] == [folder]
    tokens = next(cache.glob("*/training/tokens.bin"))
    tokens.write_bytes(tokens.read_bytes()[:-3])
    with pytest.raises(CorpusError, match="damaged"):
        load_corpus(corpus_spec(corpus=str(path)), cache)


# ---- mistakes


def test_a_token_outside_the_vocabulary_is_named(tmp_path: Path):
    (tmp_path / "a.txt").write_text("ab")
    (tmp_path / "b.txt").write_text("cz")
    corpus = load_corpus(corpus_spec(corpus=str(tmp_path), validation_fraction=0))
    corpus.check_vocabulary(ord("z") + 1)
    with pytest.raises(CorpusError, match=r"token 122 in document 1, outside .* of 122; .* at least 123"):
        corpus.check_vocabulary(ord("z"))


@pytest.mark.parametrize(
    ("files", "change", "message"),
    [
        ({}, {"corpus": "{0}/nowhere.txt"}, "there is no corpus at"),
        ({}, {"corpus": "{0}"}, "no file of .* ends in one of .arrow"),
        ({}, {"corpus": "{0}/*.txt"}, "no file of"),
        ({"a.csv": b"text\nabc\n"}, {"corpus": "{0}"}, "no file of"),
        ({"cache-1.arrow": b"x"}, {"corpus": "{0}"}, "no file of"),
        ({"dataset_dict.json": b"{}"}, {"corpus": "{0}"}, "holds the splits .*; give the folder of one"),
        ({"a.pdf": b"x"}, {"corpus": "{0}/a.pdf"}, "ending '.pdf'; a corpus ends in one of"),
        ({"a.txt": b""}, {"corpus": "{0}/a.txt"}, "is empty"),
        ({"a.txt": b"x"}, {"corpus": "{0}/a.txt"}, "too few"),
        ({"a.txt": b"ab\xff"}, {"corpus": "{0}"}, "a.txt' is not UTF-8 .byte 2"),
        ({"a.jsonl": b'{"body": "x"}\n'}, {}, "line 1: has no text in the field 'text' but .*body"),
        ({"a.jsonl": b'{"text": 3}\n'}, {}, "a.jsonl, line 1: has no text in the field 'text' but"),
        ({"a.jsonl": b'{"text": "x"}\nnull'}, {}, "a.jsonl, line 2: has no text in the field 'text' but 'None'"),
        ({"a.jsonl": b'{"text": \n'}, {}, "a.jsonl, line 1: is not JSON"),
        ({"a.parquet": b"nonsense"}, {}, "cannot read .*a.parquet' as parquet"),
        ({"a.txt": b"text"}, {"validation_corpus": "{0}/b.txt"}, "there is no corpus at .*b.txt"),
        ({"a.txt": b"text"}, {"tokenizer": "{0}/b.json"}, "no tokenizer at .*give 'bytes'"),
        ({"a.txt": b"text", "tokenizer.json": b"{}"}, {"tokenizer": "{0}"}, "is no Hugging Face tokenizer file"),
        ({"a.txt": b"text", "tokenizer.model": b""}, {"tokenizer": "{0}"}, "tokenizer.model but no tokenizer.json"),
    ],
)
def test_mistakes_are_told_in_one_sentence(tmp_path: Path, files, change, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    given = {"corpus": "{0}", **change}
    settings: dict[str, Any] = {k: v.format(tmp_path) if isinstance(v, str) else v for k, v in given.items()}
    with pytest.raises(CorpusError, match=message) as caught:
        load_corpus(corpus_spec(**settings))
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)


def test_an_end_token_must_be_in_the_tokenizer(tokenizer_file: Path):
    with pytest.raises(CorpusError, match="has no token '<missing>' to end documents with"):
        load_tokenizer(str(tokenizer_file), "<missing>")

"""Pairs for reward models: what ends their texts, and each mistake told in one sentence with file and line."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.data import CorpusError, CorpusSpec, load_corpus
from tests.chat import assistant, user
from tests.hugging_face import make_tokenizer
from tests.unit.data.corpora import corpus_spec

TEXTS = {"chosen": "the cat", "rejected": "the mat"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without a chat template."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path)
    return path


def spec_of(path: Path, folder: Path, row: Any, **settings: Any) -> CorpusSpec:
    path.write_text(f"{json.dumps(row)}\n")
    return corpus_spec(str(path), tokenizer=str(folder), validation_fraction=0.0, pairs=True, **settings)


@pytest.mark.parametrize(
    "row, told",
    [
        *(
            (row, "is no pair, from which a reward model learns, but .*all texts or all lists of messages")
            for row in (
                {"chosen": [user("a")], "rejected": "b"},
                {"chosen": "a"},
                {"chosen": 3, "rejected": 3},
                {**TEXTS, "prompt": [user("a")]},
                {**TEXTS, "prompt": 3},
            )
        ),
        ({"chosen": [1, 2, 3], "rejected": [1]}, "message 0 of its 'chosen' is '1'; a message is an object with"),
        (
            {"chosen": [assistant("a")], "rejected": [assistant("b")]},
            "has no chat template; put a chat_template.jinja into its folder, or give texts in place of messages",
        ),
    ],
)
def test_what_is_no_pair_is_named(row: Any, told: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=f"pairs.jsonl, line 1: .*{told}"):
        load_corpus(spec_of(tmp_path / "pairs.jsonl", folder, row))


def test_a_model_that_gives_tokens_is_told_who_learns_from_pairs(folder: Path, tmp_path: Path) -> None:
    told = "line 1: is a pair, from which a reward model learns; give the folder of one as model.pretrained, or"
    with pytest.raises(CorpusError, match=told):
        load_corpus(replace(spec_of(tmp_path / "pairs.jsonl", folder, TEXTS), pairs=False))

"""Conversations that `penstock score` gives to a reward model: the tokens that it has learned from."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from penstock.cli.models.input_lines import InputReader
from penstock.data import load_corpus
from penstock.engine.folders.model_folder import ModelFolder, open_model
from tests.chat import LLAMA3, assistant, user
from tests.hugging_face import SIZES, make_tokenizer
from tests.unit.data.corpora import corpus_spec

CHATS = [[user("the cat"), assistant("sat")], [user("the other user"), assistant("said so")]]


def make_model(
    folder: Path, made: Any = AutoModelForSequenceClassification, template: str | None = LLAMA3
) -> ModelFolder:
    config = AutoConfig.for_model("llama", **SIZES | {"vocab_size": 300, "pad_token_id": 0}, num_labels=1)
    made.from_config(config).save_pretrained(folder)
    make_tokenizer(folder, chat_template=template)
    return open_model(folder, may_rate=True)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_messages_are_rated_by_the_tokens_that_training_gives_them(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    pairs = write(tmp_path / "pairs.jsonl", [{"chosen": CHATS[0], "rejected": CHATS[1]}])
    learned = load_corpus(
        corpus_spec(str(pairs), tokenizer=str(tmp_path), validation_fraction=0.0, pairs=True)
    ).training
    rows = [{"messages": chat, "id": number} for number, chat in enumerate(CHATS)]
    texts = InputReader(model).texts(write(tmp_path / "texts.jsonl", [*rows, {"text": "the cat"}]))
    assert [text.id for text in texts] == [0, 1, None]
    assert [*texts[0].tokens, *texts[1].tokens] == learned.tokens.tolist()
    assert len(texts[0].tokens) == learned.offsets[1]


@pytest.mark.parametrize(
    "made, template, row, told",
    [
        (AutoModelForCausalLM, LLAMA3, {"messages": CHATS[0]}, "line 1: has only 'messages'; a line is"),
        (AutoModelForSequenceClassification, None, {"messages": CHATS[0]}, "line 1: holds messages, but the tokenizer"),
        (AutoModelForSequenceClassification, LLAMA3, {"messages": []}, "line 1: its 'messages' must be a list of one"),
    ],
)
def test_what_is_no_conversation_to_rate_is_named(
    made: Any, template: str | None, row: Any, told: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path, made, template)
    with pytest.raises(ValueError, match=told):
        InputReader(model).texts(write(tmp_path / "texts.jsonl", [row]))

"""Token ids and labels of examples are those of TRL, for several chat templates; its import takes seconds."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.data import NO_LABEL, load_corpus
from penstock.data.loader import DocumentPacking
from tests.chat import CHATML, CONVERSATIONS, INSTRUCT, LLAMA3, MARKED_CHATML, MARKED_LLAMA3
from tests.hugging_face import make_model, make_tokenizer
from tests.unit.data.corpora import corpus_spec

TEMPLATES = {"ChatML": CHATML, "Llama 3": LLAMA3, "instructions": INSTRUCT}
MARKED = {"ChatML": MARKED_CHATML, "Llama 3": MARKED_LLAMA3, "instructions": INSTRUCT}

MESSAGES = [{"messages": messages} for messages in CONVERSATIONS]
ANSWERED = [
    {"prompt": messages[:n], "completion": [message]}
    for messages in CONVERSATIONS
    for n, message in enumerate(messages)
    if message["role"] == "assistant"
]
TEXTS = [
    {"prompt": "what then?", "completion": " the cat sat on the mat."},
    {"prompt": "the m", "completion": "at sat"},  # the tokens of the whole are not those of its parts
    {"prompt": "", "completion": "the other user"},
    {"prompt": "the end", "completion": " is its own</s>"},
]


def write(path: Path, examples: list[dict[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(example)}\n" for example in examples))
    return path


def theirs(folder: Path, path: Path, template: str | None, assistant_only: bool) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of each example by TRL's trainer and its collator, without padding."""
    pytest.importorskip("trl", reason="TRL is not installed: it needs newer libraries than Penstock does")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    arguments = SFTConfig(
        output_dir=str(folder / "trl"),
        assistant_only_loss=assistant_only,
        use_cpu=True,
        report_to="none",
        bf16=False,
        max_length=None,
        disable_tqdm=True,
    )
    model = make_model("llama", vocab_size=300, num_hidden_layers=1)
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = trainer.data_collator(list(trainer.train_dataset))  # pyright: ignore
    taken = batch["attention_mask"].bool()
    return [
        (batch["input_ids"][row, taken[row]].tolist(), batch["labels"][row, taken[row]].tolist())
        for row in range(len(rows))
    ]


def ours(folder: Path, path: Path) -> list[tuple[list[int], list[int]]]:
    """Token ids of each example, and its labels moved back to their tokens; the first token is nobody's label."""
    store = load_corpus(corpus_spec(str(path), validation_fraction=0.0, tokenizer=str(folder))).training
    packing = DocumentPacking(store, 1000)
    found = []
    for number in range(store.num_documents):
        tokens, labels = packing.fill([number])
        ids = store.document(number).tolist()
        assert tokens.tolist() == ids[:-1]
        found.append((ids, labels.tolist()))
    return found


@pytest.mark.parametrize("kind", TEMPLATES)
@pytest.mark.parametrize("examples", ["messages", "messages with a prompt", "texts"])
@pytest.mark.shows(122)
def test_token_ids_and_labels_are_those_of_trl(kind: str, examples: str, tmp_path: Path) -> None:
    given = {"messages": MESSAGES, "messages with a prompt": ANSWERED, "texts": TEXTS}[examples]
    make_tokenizer(tmp_path, adds_bos=kind != "ChatML", chat_template=TEMPLATES[kind])
    path = write(tmp_path / "chat.jsonl", given)
    # TRL finds the assistant's words by marks alone; where a template has none, its twin with marks is the reference,
    # and the template itself wherever TRL takes it.
    chat = examples != "texts"
    references = [(MARKED[kind], chat)]
    if examples == "messages with a prompt" and TEMPLATES[kind] != MARKED[kind]:
        references.append((TEMPLATES[kind], False))
    found = ours(tmp_path, path)
    for template, assistant_only in references:
        expected = theirs(tmp_path, path, template, assistant_only)
        assert found == [(ids, labels[1:]) for ids, labels in expected]
    assert all(set(labels) - {NO_LABEL} for _, labels in found)
    assert all(NO_LABEL in labels for _, labels in found) or not chat


def test_examples_with_texts_among_them_are_those_of_trl(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    texts = [{"text": "the cat sat"}, {"text": "on the mat</s>"}]
    mixed = write(tmp_path / "mixed.jsonl", [TEXTS[0], *texts])
    expected = theirs(tmp_path, write(tmp_path / "texts.jsonl", texts), None, False)
    assert ours(tmp_path, mixed)[1:] == [(ids, labels[1:]) for ids, labels in expected]


def test_rows_of_text_alone_end_as_in_trl(tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    texts = ["the cat sat", "on the mat</s>", "what then? ", "the other user\n"]
    path = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    spec = corpus_spec(corpus=str(path), validation_fraction=0, tokenizer=str(tmp_path), ends_rows=True)
    store = load_corpus(spec).training
    expected = [tokens for tokens, _ in theirs(tmp_path, path, None, assistant_only=False)]
    assert [store.document(n).tolist() for n in range(store.num_documents)] == expected
    assert all(tokens[-1] == 2 for tokens in expected)

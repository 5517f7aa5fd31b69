"""Examples for fine-tuning: kept whole and apart, and every mistake told in one sentence with file and line."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.data import NO_LABEL, CorpusError, DataShard, DocumentPacking, load_corpus
from penstock.engine.run_data import RunData
from penstock.settings import ConfigError, DataConfig, ModelConfig, RunConfig, TrainConfig, ValidationConfig
from tests.chat import CHATML, CONVERSATIONS, SHORTENING, assistant, user
from tests.hugging_face import make_tokenizer
from tests.unit.data.corpora import corpus_spec

GOOD = {"messages": CONVERSATIONS[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a template without marks."""
    path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(path, chat_template=CHATML)
    return path


def write(path: Path, examples: list[Any]) -> str:
    path.write_text("".join(line if isinstance(line, str) else f"{json.dumps(line)}\n" for line in examples))
    return str(path)


def corpus_of(path: str, folder: Path, **settings: Any):
    return load_corpus(corpus_spec(path, tokenizer=str(folder), **{"validation_fraction": 0.0, **settings}))


def data_of(path: str, folder: Path, **settings: Any) -> RunData:
    """The data of a run that takes all examples at each step."""
    data = {"validation_fraction": 0.0, "cache": None, "num_sequences": len(CONVERSATIONS)}
    data |= {name: settings.pop(name) for name in list(settings) if name in DataConfig.__dataclass_fields__}
    return RunData.load(
        RunConfig(
            model=ModelConfig(vocab_size=300, max_length=settings.pop("max_length", 100)),
            data=DataConfig(corpus=path, tokenizer=str(folder), **data),
            train=TrainConfig(num_microbatches=1, **settings),
            validation=ValidationConfig(num_sequences=100),
        )
    )


# ---- what is learned


def test_only_what_the_assistant_says_is_learned_and_examples_stay_apart(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in CONVERSATIONS])
    data = data_of(path, folder, sequence_length=4)
    decode = corpus_decoder(folder)
    batch = next(data.loader(DataShard()))
    lengths = batch.sequence_lengths("tokens")
    # Each conversation is one sequence, however short a window is.
    assert len(lengths) == len(CONVERSATIONS) and min(lengths) > 4
    said = {
        "".join(f"{message['content']}<|im_end|>\n" for message in own if message["role"] == "assistant")
        for own in CONVERSATIONS
    }
    learned, start = set(), 0
    for length in lengths:
        labels = batch["labels"][start : start + length].tolist()
        learned.add(decode([label for label in labels if label >= 0]))
        start += length
    assert learned == said


def corpus_decoder(folder: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def test_a_cache_holds_what_is_learned(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [{"messages": messages} for messages in CONVERSATIONS] * 5)
    spec = corpus_spec(path, validation_fraction=0.3, tokenizer=str(folder))
    alone, first, again = load_corpus(spec), *(load_corpus(spec, tmp_path / "cache") for _ in range(2))
    for side in ("training", "validation"):
        stores = [getattr(corpus, side) for corpus in (alone, first, again)]
        items = range(stores[0].num_documents)
        assert len({store.fingerprint for store in stores}) == 1
        filled = [[part.tolist() for part in DocumentPacking(store, 100).fill(list(items))] for store in stores]
        assert filled[0] == filled[1] == filled[2]
        assert -100 in filled[0][1] and set(filled[0][1]) != {-100}
    other = make_tokenizer(tmp_path / "other", chat_template=CHATML.replace("im_end", "im_start"))
    assert other.chat_template != CHATML
    changed = load_corpus(
        corpus_spec(path, validation_fraction=0.3, tokenizer=str(tmp_path / "other")), tmp_path / "cache"
    )
    assert changed.fingerprint != alone.fingerprint


def test_tools_and_further_arguments_reach_the_template(tmp_path: Path) -> None:
    template = "{{- tools[0].function.name + '|' + mood + '|' }}" + CHATML
    make_tokenizer(tmp_path, chat_template=template, adds_bos=False)
    tools = [{"type": "function", "function": {"name": "sat"}}]
    line = {**GOOD, "chat_template_kwargs": {"mood": "mat"}}
    stores = [
        corpus_of(write(tmp_path / "chat.jsonl", [{**line, "tools": own}]), tmp_path).training
        for own in (tools, json.dumps(tools))
    ]
    texts = [corpus_decoder(tmp_path)(store.document(0).tolist()) for store in stores]
    assert texts[0] == texts[1] and texts[0].startswith("sat|mat|<|im_start|>user")


def test_rows_of_parquet_are_examples(folder: Path, tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": messages} for messages in CONVERSATIONS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "chat.parquet")
    lines = corpus_of(write(tmp_path / "chat.jsonl", rows), folder)
    assert corpus_of(str(tmp_path / "chat.parquet"), folder).fingerprint == lines.fingerprint


def test_answers_that_a_template_writes_otherwise_later_are_examples_of_their_own(tmp_path: Path) -> None:
    make_tokenizer(tmp_path, chat_template=SHORTENING)
    first, second = [user("what then?"), assistant("the cat</think>sat")], [user("so?"), assistant("the mat</think>so")]
    whole = corpus_of(write(tmp_path / "chat.jsonl", [{"messages": first + second}]), tmp_path).training
    rows = [{"prompt": first[:1], "completion": first[1:]}, {"prompt": first + second[:1], "completion": second[1:]}]
    apart = corpus_of(write(tmp_path / "apart.jsonl", rows), tmp_path).training
    assert whole.num_documents == apart.num_documents == 2
    for number in range(2):
        found, expected = (DocumentPacking(store, 200).fill([number]) for store in (whole, apart))
        assert all((own == other).all() for own, other in zip(found, expected, strict=True))
    decode = AutoTokenizer.from_pretrained(tmp_path).decode
    tokens, labels = DocumentPacking(whole, 200).fill([1])
    assert "<|im_start|>assistant\nsat<|im_end|>" in decode(tokens), "as it is written for the second prompt"
    assert decode(labels[labels != NO_LABEL]).endswith("the mat</think>so<|im_end|>\n")
    # Both are held back for validation, or neither.
    rows = [{"messages": first + second}] * 40
    sides = corpus_of(write(tmp_path / "many.jsonl", rows), tmp_path, validation_fraction=0.3)
    assert sides.validation is not None and sides.validation.num_documents % 2 == 0 < sides.training.num_documents


# ---- mistakes


@pytest.mark.parametrize(
    "line, told",
    [
        ("{nonsense\n", "is not JSON .*; a line is one JSON object"),
        ("[1]\n", r"is no example but '\[1\]'; a line is {\"messages\""),
        ({"question": "a", "answer": "b"}, "is no example but .*question.*; a line is {\"messages\""),
        ({"prompt": "the cat"}, "is no example but"),
        ({"messages": "hello"}, "'messages' must be a list of one message or more; a message is an object with"),
        ({"messages": []}, "'messages' must be a list of one message or more"),
        ({"messages": [3]}, "message 0 of its 'messages' is '3'; a message is an object with"),
        ({"messages": [{"content": "hello"}]}, "message 0 of its 'messages' is"),
        ({"messages": [user("hello")]}, 'the assistant says nothing; give it messages of the role "assistant"'),
        ({"messages": [{"role": "user", "content": None}, assistant("a")]}, "message 0 of .*; a message is"),
        ({"messages": [user("hello"), assistant("")]}, "the assistant says nothing; .* none empty"),
        ({"messages": [user("hello"), {"role": "assistant"}]}, "the assistant says nothing"),
        ({"messages": [assistant("hello")]}, "begins with the assistant, .*; begin with another message"),
        ({"messages": [user("hello"), assistant("cat " * 200)]}, r"has \d+ tokens, .* takes at most 100; shorten"),
        ({"prompt": "hello", "completion": ""}, "is no example but"),
        ({"prompt": "hello", "completion": [assistant("cat")]}, "is no example but .*lists of messages"),
        ({"prompt": [user("hello")], "completion": [user("cat")]}, "the assistant says nothing"),
        ({"prompt": "hello", "completion": "\ud800"}, "cannot be written as UTF-8"),
        ({"messages": [user("hello"), {"role": "assistant", "content": 3}]}, "message 1 of .*; a message is"),
        ({**GOOD, "tools": "{"}, "'tools' are no JSON; give a list of objects"),
        ({**GOOD, "tools": "[" * 100_000}, "'tools' are no JSON; give a list of objects"),
        ({**GOOD, "chat_template_kwargs": 3}, "'chat_template_kwargs' must be an object"),
    ],
)  # fmt: skip
def test_an_example_that_cannot_be_learned_is_named_with_file_and_line(
    line: Any, told: str, folder: Path, tmp_path: Path
) -> None:
    path = write(tmp_path / "chat.jsonl", [GOOD, "\n", line, GOOD])
    with pytest.raises(CorpusError, match=rf"chat.jsonl, line 3: .*{told}") as caught:
        corpus_of(path, folder, max_example_tokens=100)
    assert "\n" not in str(caught.value)


def test_impossible_files_and_settings_are_refused(folder: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [GOOD])
    (tmp_path / "more.txt").write_text("no rows")
    for change, told in [
        ({"tokenizer": "bytes"}, "examples need a model's tokenizer, not 'bytes'"),
        ({"tokenizer": str(tmp_path / "no")}, "transformers finds no tokenizer in"),
        ({"tokenizer": str(tmp_path)}, "transformers finds no tokenizer in"),
        ({"end_token": "<none>"}, "has no token '<none>' to end examples with"),
        ({"corpus": str(tmp_path)}, "more.txt' has no rows; examples are in files that end in .jsonl"),
        ({"validation_fraction": 0.5}, "holds one example; for validation give another file"),
    ]:
        with pytest.raises(CorpusError, match=told) as caught:
            load_corpus(corpus_spec(**{"corpus": path, "tokenizer": str(folder), "validation_fraction": 0.0, **change}))
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="cross_documents = true, but examples and pairs are never packed across"):
        data_of(path, folder, cross_documents=True)
    with pytest.raises(
        ConfigError, match=r"max_microbatch_tokens = 5, but an example .* has \d+ tokens, and none is cut"
    ):
        data_of(path, folder, sequence_length=4, max_microbatch_tokens=5)

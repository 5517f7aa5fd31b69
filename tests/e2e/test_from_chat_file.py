"""From a file of conversations to an answer, by one command after another; an epoch is as long as TRL's."""

import io
import json
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn, zeros
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from penstock.cli.main import main
from penstock.engine.folders.runs import read_metrics
from tests.chat import assistant, user
from tests.hugging_face import SIZES, make_tokenizer

TEMPLATE = (
    "{% set mark = '!' if brief else ':' %}"
    "{% for message in messages %}<|im_start|>{{ message.role + mark + message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ mark }}{% endif %}"
)
ANSWERS = {"what is a stage?": "some layers.", "what is a bubble?": "a wait.", "and the cat?": "on the mat."}
QUIET = ("--log.timeline", "false", "--log.tensorboard", "false", "--data.cache", "None", "--validation.every", "0")
EPOCHS, BATCH = 45.5, 2


class Talk(NamedTuple):
    """What a conversation has printed: answers, a line each, and what else there was to say."""

    out: list[str]
    err: str


def steps_of_trl(num_examples: int, epochs: float, batch: int, accumulation: int, folder: Path) -> int:
    """The steps of transformers' trainer, on which TRL's stands."""
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation, use_cpu=True
    )
    arguments.num_train_epochs = epochs
    trainer = Trainer(nn.Linear(1, 1), arguments)
    loader = DataLoader(TensorDataset(zeros(num_examples)), batch_size=batch)
    return trainer.set_initial_training_values(arguments, loader)[-1]


@pytest.mark.shows(181)
def test_a_chat_file_becomes_a_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    sizes = {**SIZES, "vocab_size": 300, "hidden_size": 64, "max_position_embeddings": 128, "eos_token_id": 4}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes)).save_pretrained("base")
    make_tokenizer(Path("base"), adds_bos=False, eos_token="<|im_end|>", chat_template=TEMPLATE)
    rows = [{"messages": [user(asked), assistant(said)]} for asked, said in ANSWERS.items()]
    brief = {"messages": [user("and the cat?"), assistant("so what.")], "chat_template_kwargs": {"brief": True}}
    # One long example, which fills most of a step.
    rows += [brief, {"messages": [user("cat " * 20), assistant("mat " * 9)]}]
    Path("chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["train", "--model.pretrained", "base", "--data.corpus", "chat.jsonl", "--data.validation_fraction", "0"]
    words += ["--output", "tuned", "--data.num_sequences", str(2 * BATCH), "--train.num_microbatches", "2", *QUIET]
    words += ["--optimizer.learning_rate", "5e-3", "--train.epochs", str(EPOCHS)]

    assert main([*words, "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    steps = steps_of_trl(len(rows), EPOCHS, BATCH, 2, tmp_path / "trl")
    assert main(words) == 0
    metrics = [entry for entry in read_metrics(Path("tuned/metrics.jsonl")) if "loss" in entry]
    assert [entry["step"] for entry in metrics] == list(range(1, steps + 1))
    assert plan["num_items"] == len(rows)
    assert plan["epochs"] == pytest.approx(steps * 2 * BATCH / len(rows))
    capsys.readouterr()

    asked = [
        {"messages": row["messages"][:1], **{name: own for name, own in row.items() if name != "messages"}}
        for row in rows[:4]
    ]
    Path("asked.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in asked))
    assert main(["generate", "tuned", "--file", "asked.jsonl", "--temperature", "0", "--max-new-tokens", "12"]) == 0
    answers = [json.loads(line) for line in Path("asked.answers.jsonl").read_text().splitlines()]
    assert [answer["text"] for answer in answers] == [*ANSWERS.values(), "so what."]
    capsys.readouterr()
    assert main(["generate", "tuned", "--file", "chat.jsonl"]) == 2
    assert "chat.jsonl, line 1: ends with the assistant" in capsys.readouterr().err

    lines = [
        "what is a stage?",
        "and the cat?",
        "/system short",
        "and the cat?",
        "/clera",
        "/clear",
        *("what is a bubble? " * 12, "/system", "and the cat?", "/exit", "never read"),
    ]
    said = talk(monkeypatch, capsys, lines, "--temperature", "0", "--max-new-tokens", "12")
    # As the same messages in a file are answered.
    first = [user("what is a stage?"), assistant(said.out[0]), user("and the cat?")]
    system = {"role": "system", "content": "short"}
    wanted = [first[:1], first, [system, user("and the cat?")]]
    Path("again.jsonl").write_text("".join(f"{json.dumps({'messages': messages})}\n" for messages in wanted))
    assert main(["generate", "tuned", "--file", "again.jsonl", "--temperature", "0", "--max-new-tokens", "12"]) == 0
    answers = [json.loads(line)["text"] for line in Path("again.answers.jsonl").read_text().splitlines()]
    capsys.readouterr()
    assert said.out == [*answers, ANSWERS["and the cat?"]]
    assert said.out[0] == ANSWERS["what is a stage?"]
    assert "there is no command '/clera'" in said.err and "/clear" in said.err
    assert "too many for the model; /clear begins a new one" in said.err
    brief = ("--chat-template-kwargs", '{"brief": true}', "--top-k", "1")
    switched = talk(monkeypatch, capsys, ["never read"], "/clear", "and the cat?", *brief)
    assert switched.out == ["so what."]
    assert main(["chat", "tuned", "--chat-template-kwargs", "brief"]) == 2
    assert "is no JSON object" in capsys.readouterr().err


def talk(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], lines: list[str], *words: str) -> Talk:
    """What a conversation prints for these lines, as they are typed."""
    capsys.readouterr()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        assert main(["chat", "tuned", *words]) == 0
    printed = capsys.readouterr()
    return Talk(printed.out.splitlines(), printed.err)

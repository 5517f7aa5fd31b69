"""Supervised fine-tuning from the command line: one command, and the losses of a plain loop of transformers."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from penstock.data import NO_LABEL, DataShard, PackedBatch
from penstock.engine.folders.runs import METRICS_FILE, RUN_FILE, read_metrics
from penstock.engine.run_data import RunData
from penstock.settings import read_config
from tests.chat import LLAMA3, assistant, user
from tests.e2e.training import run
from tests.hugging_face import make_model, make_tokenizer

CLOSE = 1e-4
STEPS, RATE = 10, 1e-2
ANIMALS = ["cat", "mat", "user", "other"]


def write(path: Path, numbers: range) -> str:
    """A small set of instructions: what each animal says, so many times."""
    lines = [
        {"messages": [user(f"what said the {animal} {number}?"), assistant(" ".join([animal] * (number % 3 + 1)))]}
        for number in numbers
        for animal in ANIMALS
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


def padded(batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """The batch's sequences as transformers takes them: token ids and labels at the tokens themselves, padded."""
    lengths = batch.sequence_lengths("tokens")
    tokens, labels = (list(batch[key].split(lengths)) for key in ("tokens", "labels"))
    none = torch.tensor([NO_LABEL])
    return (
        pad_sequence(tokens, batch_first=True),
        pad_sequence([torch.cat([none, own]) for own in labels], batch_first=True, padding_value=NO_LABEL),
    )


def loss_of(model: torch.nn.Module, batch: PackedBatch) -> Tensor:
    tokens, labels = padded(batch)
    # One more token, which the last label needs; nothing attends to it.
    tokens = torch.nn.functional.pad(tokens, (0, 1))
    return model(input_ids=tokens, labels=labels).loss


@pytest.mark.shows(123)
def test_fine_tuning_reaches_the_losses_of_a_plain_loop(tmp_path: Path) -> None:
    base, output = tmp_path / "base", tmp_path / "out"
    make_model("llama", vocab_size=300).save_pretrained(base)
    make_tokenizer(base, chat_template=LLAMA3)
    corpus, validation = write(tmp_path / "chat.jsonl", range(6)), write(tmp_path / "eval.jsonl", range(6, 8))
    ended = run(
        *("--model.pretrained", str(base), "--data.corpus", corpus),
        *("--output", str(output), "--parallel.pp", "2", "--parallel.timeout_s", "60"),
        *("--data.cache", str(tmp_path / "cache"), "--data.validation_corpus", validation),
        *("--train.steps", str(STEPS), "--train.num_microbatches", "4", "--log.timeline", "false"),
        *("--optimizer.learning_rate", str(RATE), "--optimizer.decay", "constant", "--optimizer.weight_decay", "0"),
        *("--validation.every", "5", "--checkpoint.every", "0", "--log.tensorboard", "false"),
    )
    assert ended.exit_code == 0, ended.err
    metrics = read_metrics(output / METRICS_FILE)
    config = read_config(output / RUN_FILE)
    data = RunData.load(config)
    batches, held_out = data.loader(DataShard()), data.validation(DataShard())
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    rule = config.optimizer
    optimizer = torch.optim.AdamW(model.parameters(), RATE, (rule.beta1, rule.beta2), weight_decay=0.0)
    losses, validated = [], {}
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = loss_of(model, next(batches))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), rule.clip_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 5 == 0:
            with torch.no_grad():
                weights = [float((padded(batch)[1] != NO_LABEL).sum()) for batch in held_out]
                sums = [float(loss_of(model, batch)) * weight for batch, weight in zip(held_out, weights, strict=True)]
            validated[step] = sum(sums) / sum(weights)
    found = {entry["step"]: entry["loss"] for entry in metrics if "loss" in entry}
    assert list(found) == list(range(1, STEPS + 1))
    assert [found[step] for step in found] == pytest.approx(losses, abs=CLOSE)
    assert {e["step"]: e["validation_loss"] for e in metrics if "validation_loss" in e} == pytest.approx(
        validated, abs=CLOSE
    )
    assert losses[-1] < losses[0] / 4

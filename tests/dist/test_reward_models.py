"""Reward models and value heads of transformers: loaded, scored, trained in two stages and written back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from penstock import Engine, EngineOptions, Layout, PackedBatch
from penstock.cli.main import main
from penstock.settings import LearningRate, OptimizerConfig, OptimizerName
from tests.dist.launch import run_ranks
from tests.hugging_face import CLOSE, SIZES, make_sequences, make_tokenizer

LENGTHS = (5, 3, 9, 2)  # a chosen and a rejected text, twice
CLASSES: dict[str, Any] = {
    "reward": AutoModelForSequenceClassification,
    "value": AutoModelForTokenClassification,
}


def make(folder: Path, head: str, num_labels: int = 1) -> None:
    torch.manual_seed(3)
    config = AutoConfig.for_model("llama", **SIZES, num_labels=num_labels, classifier_dropout=0.0)
    model = CLASSES[head].from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    model.save_pretrained(folder)


def lasts(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor(lengths).cumsum(0) - 1


def ranking_loss(output: Tensor, microbatch: PackedBatch) -> Tensor:
    """Bradley-Terry: the first of two texts is to have the higher reward."""
    rewards = output.squeeze(-1)[lasts(microbatch.sequence_lengths())]
    return -torch.nn.functional.logsigmoid(rewards[0::2] - rewards[1::2]).sum()


def value_loss(output: Tensor, microbatch: PackedBatch) -> Tensor:
    """Each token's value is to be a tenth of its position."""
    wanted = torch.cat([torch.arange(n) / 10 for n in microbatch.sequence_lengths()])
    return (output.squeeze(-1) - wanted).square().sum()


LOSSES = {"reward": ranking_loss, "value": value_loss}


def train(rank: int, folder: Path, head: str, layout: Layout) -> tuple[Any, float, Any]:
    """The outputs before and after a step, and its loss; the model is written."""
    optimizer = OptimizerConfig(LearningRate(1e-2), weight_decay=0.0, clip_norm=0.0, name=OptimizerName.SGD)
    engine = Engine.from_hf(folder, layout, EngineOptions(optimizer=optimizer, device="cpu"), native="auto")
    texts = make_sequences(LENGTHS)
    # A pair is one item, which no microbatch cuts.
    batch = PackedBatch.from_documents([texts[:2], texts[2:]])
    before = engine.forward(batch, broadcast=True)
    loss = engine.train_batch(batch, LOSSES[head], lambda microbatch: microbatch.num_items / 2).loss
    after = engine.forward(batch, broadcast=True)
    engine.save_hf(folder.parent / f"trained-{layout.pp}")
    engine.close()
    return before, float(loss), after


@pytest.mark.shows(130)
@pytest.mark.parametrize("head", CLASSES)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_reward_model_and_a_value_head_load_score_train_and_are_written_back(
    head: str, pp: int, tmp_path: Path
) -> None:
    make(tmp_path / "model", head)
    [(before, loss, after), *_] = run_ranks(pp, train, tmp_path / "model", head, Layout(pp=pp))
    model, sequences = CLASSES[head].from_pretrained(tmp_path / "model"), make_sequences(LENGTHS)

    def outputs() -> Tensor:
        """The reward of each text, or the value of each token."""
        found = [model(input_ids=sequence[None]).logits for sequence in sequences]
        return torch.cat(found) if head == "reward" else torch.cat([own[0] for own in found])

    def ours(given: Tensor) -> Tensor:
        return given[lasts(LENGTHS)] if head == "reward" else given

    assert before.shape == (sum(LENGTHS), 1)
    torch.testing.assert_close(ours(before), outputs().detach(), atol=CLOSE, rtol=CLOSE)
    values = outputs().squeeze(-1)
    if head == "reward":
        expected = -torch.nn.functional.logsigmoid(values[0::2] - values[1::2]).sum()
    else:
        expected = (values - torch.cat([torch.arange(n) / 10 for n in LENGTHS])).square().sum()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-4)
    expected.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 1e-2 * parameter.grad
    torch.testing.assert_close(ours(after), outputs().detach(), atol=10 * CLOSE, rtol=10 * CLOSE)
    assert not torch.equal(before, after)
    written = CLASSES[head].from_pretrained(tmp_path / f"trained-{pp}")
    for name, parameter in written.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), atol=10 * CLOSE, rtol=10 * CLOSE)


@pytest.mark.shows(130)
@pytest.mark.parametrize("head, labels, pp", [("reward", 1, 2), ("reward", 3, 1), ("value", 1, 1)])
def test_the_command_writes_what_transformers_rates(head: str, labels: int, pp: int, tmp_path: Path) -> None:
    folder, lines = tmp_path / "model", tmp_path / "texts.jsonl"
    make(folder, head, num_labels=labels)
    texts = [own.tolist() for own in make_sequences((5, 1, 9))]
    texts.append([*texts[0], 0, 0])  # padding is not rated
    lines.write_text("".join(json.dumps({"tokens": text, "id": n}) + "\n" for n, text in enumerate(texts)))
    assert main(["score", str(folder), str(lines), "--pp", str(pp)]) == 0
    found = [json.loads(line) for line in (tmp_path / "texts.scores.jsonl").read_text().splitlines()]
    model, name = CLASSES[head].from_pretrained(folder), {"value": "values"}.get(head, "rewards"[: 6 + (labels > 1)])
    for number, (text, own) in enumerate(zip(texts, found, strict=True)):
        logits = model(input_ids=torch.tensor([text])).logits[0].detach()
        expected = logits if labels > 1 else logits[..., 0]
        assert own.keys() == {"line", "id", name} and own["id"] == number
        torch.testing.assert_close(torch.tensor(own[name]), expected, atol=CLOSE, rtol=CLOSE)


@pytest.mark.parametrize(
    "head, labels, told",
    [
        ("reward", 3, "penstock train takes a reward model, which has one label"),
        ("value", 1, "Classification rates texts and gives no tokens; penstock score writes"),
    ],
)
def test_no_run_begins_with_what_gives_no_single_reward(
    head: str, labels: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path, head, labels)
    make_tokenizer(tmp_path)
    assert main(["train", "--model.pretrained", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err

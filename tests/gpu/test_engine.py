"""On a GPU an engine scores, generates, saves, loads, and goes on after an error, as it does on a CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import BatchError, PackedBatch, SamplingParams
from penstock.engine import token_cross_entropy, token_scores
from penstock.settings import ModelConfig, Precision
from tests.gpu.small_engines import DENSE, EXPERTS, SPEC, made, taken, texts


@pytest.mark.gpu
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_scores_are_those_of_the_cpu(config: ModelConfig, device: str) -> None:
    found = []
    for place in ("cpu", device):
        engine = made(place, config=config)
        scores = engine.forward(texts(), token_scores(entropies=True), micro_batches=SPEC)
        found.append((scores, float(engine.evaluate(texts(), micro_batches=SPEC))))
        engine.close()
    (exact, loss), (scores, other) = found
    assert scores.keys() == exact.keys() == {"log_probs", "entropies"}
    for name, values in scores.items():
        torch.testing.assert_close(values.cpu(), exact[name], rtol=1e-4, atol=1e-4)
    assert other == pytest.approx(loss, rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "limit"), [(Precision.FP32, 1e-3), (Precision.BF16, 0.1)])
def test_tokens_are_scored_as_they_were_generated(precision: Precision, limit: float, device: str) -> None:
    engine = made(device, precision=precision)
    prompts = [list(range(1, 1 + n)) for n in (5, 70, 1, 200)]
    answers = engine.generate(prompts, SamplingParams(max_new_tokens=20, temperature=1.0, seed=3))
    whole = PackedBatch.from_documents([[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers)])
    scores = engine.forward(whole, token_scores())["log_probs"].cpu().split(whole.sequence_lengths())
    for prompt, answer, of_text in zip(prompts, answers, scores, strict=True):
        # A token's score stands at the one before it.
        expected = of_text[len(prompt) - 1 : -1]
        torch.testing.assert_close(torch.tensor(answer.log_probs), expected, rtol=limit, atol=limit)
    engine.close()


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_checkpoint_continues_with_the_bits_of_the_run(
    config: ModelConfig, precision: Precision, tmp_path: Path, device: str
) -> None:
    engine = made(device, config=config, precision=precision)
    for _ in range(2):
        engine.train_batch(texts(), micro_batches=SPEC)
    engine.save(tmp_path / "step2")
    going_on = taken(engine)
    loaded = made(device, config=config, precision=precision, seed=5)
    loaded.load(tmp_path / "step2")
    assert loaded.step == 2
    taken(loaded).check_bits(going_on)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_checkpoint_is_read_on_the_other_device(precision: Precision, tmp_path: Path, device: str) -> None:
    for source, target in ((device, "cpu"), ("cpu", device)):
        engine = made(source, precision=precision)
        engine.train_batch(texts(), micro_batches=SPEC)
        engine.save(tmp_path / source / "step1")
        loaded = made(target, precision=precision, seed=5)
        loaded.load(tmp_path / source / "step1")
        state, theirs = loaded.state(), engine.state()
        assert state.keys() == theirs.keys() and len(state) > 20
        for name, own in state.items():
            assert isinstance(own, Tensor)
            assert torch.equal(own.cpu(), theirs[name].cpu()), name  # type: ignore[union-attr]
        engine.close()
        loaded.close()


# ---- errors


def raises_late(logits: Tensor, microbatch: Any) -> Tensor:
    """A loss that fails in a microbatch in the midst of the step."""
    if 129 in microbatch.sequence_lengths():
        raise ValueError("a loss that fails")
    return token_cross_entropy(logits, microbatch)


def wants_too_much(logits: Tensor, microbatch: Any) -> Tensor:
    """A loss that asks for a petabyte."""
    if 129 in microbatch.sequence_lengths():
        return logits.new_empty(1 << 48).sum()
    return token_cross_entropy(logits, microbatch)


def has_no_graph(logits: Tensor, microbatch: Any) -> Tensor:
    """A loss without a graph in one microbatch."""
    if 129 in microbatch.sequence_lengths():
        return token_cross_entropy(logits.detach(), microbatch)
    return token_cross_entropy(logits, microbatch)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("loss_fn", [raises_late, wants_too_much, has_no_graph])
def test_a_step_that_fails_is_undone_and_the_next_has_the_bits_of_a_run_without_it(
    loss_fn: Any, schedule: str, device: str
) -> None:
    engine = made(device, schedule)
    with pytest.raises(Exception, match=r"a loss that fails|memory|without a graph"):
        engine.train_batch(texts(), loss_fn, micro_batches=SPEC)
    assert engine.step == 0
    taken(engine).check_bits(taken(made(device, schedule)))


@pytest.mark.gpu
def test_ids_that_no_word_has_are_refused_before_they_reach_the_device(device: str) -> None:
    engine = made(device)
    batch = texts()
    batch["labels"][9] = 256
    for wrong in (PackedBatch.from_documents([[1, 2, 256], [4, 5]]), PackedBatch.from_documents([[1, -5]]), batch):
        with pytest.raises(BatchError):
            engine.train_batch(wrong, micro_batches=None)
    with pytest.raises(ValueError):
        engine.generate([[1, 256]])
    # An assertion on a device would have ended all that this process can do there.
    assert engine.train_batch(texts(), micro_batches=SPEC).step == 1
    engine.close()


@pytest.mark.gpu
def test_numbers_that_are_none_skip_the_step(device: str) -> None:
    engine = made(device, precision=Precision.FP16)

    def without_a_number(logits: Tensor, microbatch: Any) -> Tensor:
        return token_cross_entropy(logits, microbatch) * torch.inf

    before = {name: own.detach().clone() for name, own in engine.parameters().items()}
    assert not engine.train_batch(texts(), without_a_number, micro_batches=SPEC).success
    assert all(torch.equal(own, before[name]) for name, own in engine.parameters().items())
    assert engine.train_batch(texts(), micro_batches=SPEC).success
    engine.close()

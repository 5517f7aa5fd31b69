"""Training, scoring and generation take turns on one engine and one set of weights, and none leaves a trace in another.

The ranks of a case are started once and run all of it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.data import NO_LABEL
from penstock.engine import EngineOptions, GenerateOptions
from penstock.engine.training.scorer import token_scores
from penstock.model import decoder_units
from penstock.settings import ModelConfig
from tests.dist.launch import run_ranks

CONFIG = ModelConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4, num_kv_heads=2, max_length=64
)
SPEC = MicroBatchSpec(num=3)
END = 7


def make(pp: int, schedule: str = "1f1b", config: ModelConfig = CONFIG) -> Engine:
    options = EngineOptions(schedule, timeout_s=60.0, device="cpu")
    return Engine(decoder_units(config), config.hidden_size, Layout(pp=pp), options)


def batch(step: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, 12, (6,), generator=generator).tolist()
    return PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in lengths])


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (5,), generator=generator).tolist()
    return [torch.randint(0, 40, (n,), generator=generator).tolist() for n in lengths]


def score(engine: Engine, number: int) -> None:
    engine.forward(batch(100 + number), token_scores(entropies=True), micro_batches=SPEC, broadcast=True)


def evaluate(engine: Engine, number: int) -> None:
    engine.evaluate([batch(200 + number), batch(300 + number)], micro_batches=SPEC)


def generate(engine: Engine, number: int) -> None:
    engine.generate(prompts(number), SamplingParams(max_new_tokens=6, end_tokens=(END,), seed=number))


# ---- training is what it is without the others


def train(engine: Engine, others: list[Callable[[Engine, int], None]]) -> dict[str, Any]:
    """Three steps, one of the others before, between and after them in turn; all of what training has come to."""
    addresses = {name: p.data_ptr() for name, p in engine.parameters().items()}
    results = []
    for step in range(3):
        for number, other in enumerate(others[step % 3 :]):
            other(engine, 10 * step + number)
        results.append(engine.train_batch(batch(step), micro_batches=SPEC))
    for other in others:
        other(engine, 99)
    assert addresses == {name: p.data_ptr() for name, p in engine.parameters().items()}, "one set of weights"
    found = {
        "losses": [r.loss for r in results],
        "norms": [r.grad_norm for r in results],
        "state": {name: value.clone() for name, value in engine.state().items() if isinstance(value, Tensor)},
        "pending": engine.pipeline.transport.num_pending(),
        "random": torch.get_rng_state(),
    }
    engine.close()
    engine.grid.close()
    return found


def train_both_ways(rank: int, pp: int, schedules: tuple[str, ...]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [
        (train(make(pp, schedule), []), train(make(pp, schedule), [generate, score, evaluate, generate]))
        for schedule in schedules
    ]


@pytest.mark.parametrize("pp, schedules", [(1, ("1f1b",)), (2, ("interleaved", "zb-v")), (3, ("zb-h1",))], ids=str)
def test_training_is_bit_for_bit_what_it_is_without_scoring_and_generation(pp: int, schedules: tuple[str, ...]) -> None:
    for by_schedule in run_ranks(pp, train_both_ways, pp, schedules, timeout_s=110.0):
        assert len(by_schedule) == len(schedules)
        for alone, among_others in by_schedule:
            assert among_others["losses"] == alone["losses"] and among_others["norms"] == alone["norms"]
            assert alone["state"].keys() == among_others["state"].keys()
            assert any(name.startswith("optimizer.exp_avg.") for name in alone["state"]), "weights are not all there is"
            assert all(torch.equal(value, among_others["state"][name]) for name, value in alone["state"].items())
            assert torch.equal(alone["random"], among_others["random"])
            assert alone["pending"] == among_others["pending"] == 0


# ---- generation and scoring say the same


def generate_and_score(rank: int, pp: int) -> list[tuple[list[float], list[float]]]:
    """By temperature: the log-probabilities with which answers came, and those of scoring them."""
    engine, found = make(pp), []
    engine.train_batch(batch(0), micro_batches=SPEC)
    for temperature in (1.0, 0.7):
        asked = prompts(1)
        params = SamplingParams(
            max_new_tokens=12, end_tokens=(END,), num_samples=3, temperature=temperature, raw_log_probs=True
        )
        answers = engine.generate(asked, params, GenerateOptions(rows_per_slot=2))
        texts = [[*asked[one.prompt], *one.tokens] for one in answers]
        labels = [[NO_LABEL] * (len(asked[one.prompt]) - 1) + list(one.tokens) + [NO_LABEL] for one in answers]
        packed = PackedBatch.from_sequences({"tokens": texts, "labels": labels})
        for divisor, told in ((temperature, "log_probs"), (1.0, "raw_log_probs")):
            scores = engine.forward(packed, token_scores(divisor), micro_batches=SPEC, broadcast=True)
            scored = scores["log_probs"][packed["labels"] != NO_LABEL].tolist()
            found.append(([value for one in answers for value in getattr(one, told)], scored))
    engine.close()
    engine.grid.close()
    return found


@pytest.mark.shows(64)
@pytest.mark.parametrize("pp", [1, 2, 3])
def test_log_probabilities_of_generation_are_those_of_scoring(pp: int) -> None:
    for cases in run_ranks(pp, generate_and_score, pp, timeout_s=110.0):
        assert len(cases) == 4
        for generated, scored in cases:
            assert len(generated) == len(scored) > 30
            assert scored == pytest.approx(generated, abs=1e-5)
            ratios = torch.exp(torch.tensor(scored) - torch.tensor(generated))
            torch.testing.assert_close(ratios, torch.ones(len(ratios)), rtol=0, atol=1e-5)

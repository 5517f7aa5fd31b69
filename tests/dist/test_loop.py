"""Generation and scoring say the same of a token, on one engine that has trained."""

import pytest
import torch

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

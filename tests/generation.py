"""Small models and prompts for the tests of generation, and every rank of a ring in this thread."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from penstock.model import ModelConfig, decoder_units

# Widths are multiples of the vectors' length, so that a row's bits do not depend on how many others there are.
CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, max_length=96
)
LENGTHS = (7, 1, 19, 19, 4, 2)


def random_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 2) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths]


@cache
def random_weights(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """Weights by full name, large enough for answers that differ."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for unit in decoder_units(config):
        for name, parameter in unit.build().named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            weights[unit.full_name(name)] = 0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0)
    return weights


def load(parameters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name.removesuffix("@2")])

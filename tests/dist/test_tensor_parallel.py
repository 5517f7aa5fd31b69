"""Units that several ranks share: each against itself where nobody does, and what travels between the ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Layout
from penstock.model import (
    ModelGroups,
    Sequences,
    ShardedLogits,
    UnitSpec,
    cross_entropy_sum,
    decoder_units,
    drain,
    token_statistics,
)
from penstock.parallel.collectives import Collectives, Handle
from penstock.parallel.tensor_slice import Shard
from penstock.runtime import Boundary, Message, Stage, Tape
from penstock.schedule.recording import CollectiveKind
from penstock.settings import ModelConfig
from tests.dist.launch import run_ranks

# Sums of a few hundred terms of size one, in another order.
TOLERANCE = 1e-12
CONFIG = ModelConfig(41, 16, 24, num_layers=1, num_heads=4, num_kv_heads=2, qkv_bias=True, qk_norm=True)
CONFIGS = {
    "two key heads": CONFIG,
    "one key head": replace(CONFIG, num_kv_heads=1),
    "all key heads, a window": replace(CONFIG, num_kv_heads=4, sliding_window=3),
    "tied": replace(CONFIG, tie_embeddings=True, qk_norm=False),
}
# Three tokens on four ranks leave one without any.
LENGTHS = [(5, 2, 6), (3,), (8, 8)]


@dataclass
class Ledger:
    """Remembers every collective that it was told of."""

    launched: list[tuple[CollectiveKind, int]] = field(default_factory=list)

    def follow(
        self, kind: CollectiveKind, num_bytes: int, work: Handle[object], group: object = None
    ) -> Handle[object]:
        self.launched.append((kind, num_bytes))
        return work


def built(unit: UnitSpec) -> Stage:
    module = unit.build().double()
    unit.initialise(module, 0)
    return Stage(0, [(unit.name, module)], Boundary(CONFIG.hidden_size, torch.float64))


def through(stage: Stage, x: Tensor, sequences: Sequences, grad: Tensor) -> tuple[Tensor, Tensor | None, Any]:
    """Output, gradient of the input, and gradients of the parameters, for one gradient of the output."""
    tape = Tape()
    # Only what `finish` makes of an output may have another width.
    y = drain(stage.forward(tape, Message((x,)), sequences, lambda y: y))
    grad_x = drain(stage.backward(tape, Message((grad,))))
    stage.weight_backward(tape)
    return y.value, next(iter(grad_x.tensors), None), {name: p.grad for name, p in stage.named_parameters()}


def unit_errors(rank: int, config: ModelConfig, lengths: tuple[int, ...]) -> dict[str, float]:
    """How far each unit's outputs and gradients on this rank lie from its part of the whole unit's."""
    group = dist.group.WORLD
    assert group is not None
    size, errors = group.size(), {}
    sequences = Sequences.from_lengths(lengths)
    num_tokens = sequences.num_tokens
    share = -(-num_tokens // size)
    generator = torch.Generator().manual_seed(1)

    def run_of(whole: Tensor) -> Tensor:
        """This rank's tokens, with zeros behind them."""
        padded = torch.cat([whole, whole.new_zeros(size * share - num_tokens, *whole.shape[1:])])
        return padded[rank * share : (rank + 1) * share]

    for whole, shared in zip(decoder_units(config), decoder_units(config, groups=ModelGroups(tp=group)), strict=True):
        first, last = whole.name == "embedding", whole.name == "head"
        x = torch.randn(num_tokens, config.hidden_size, generator=generator, dtype=torch.float64)
        if first:
            x = torch.randint(0, config.vocabulary, (num_tokens,), generator=generator)
        width = config.vocabulary if last else config.hidden_size
        grad = torch.randn(num_tokens, width, generator=generator, dtype=torch.float64)
        part = Shard("tp", 1, rank, size, tuple(grad.shape))
        y, grad_x, gradients = through(built(whole), x, sequences, grad)
        own = part.of(grad) if last else run_of(grad)
        own_x = x if first else run_of(x)
        own_y, own_grad_x, own_gradients = through(built(shared), own_x, sequences, own.contiguous())
        errors[f"{whole.name} output"] = float((own_y - (part.of(y) if last else run_of(y))).abs().max())
        if not first:
            assert grad_x is not None and own_grad_x is not None
            errors[f"{whole.name} input"] = float((own_grad_x - run_of(grad_x)).abs().max())
        assert own_gradients.keys() == gradients.keys()
        for name, gradient in own_gradients.items():
            parameter = name.removeprefix(f"{whole.name}.")
            shard = shared.sharding.get(parameter)
            if parameter in shared.partial:
                # Summed over the ranks that hold the same: all of them, or those with the same part.
                rows = gradient.new_zeros(1 if shard is None else shard.count, *gradient.shape)
                rows[0 if shard is None else shard.index] = gradient
                dist.all_reduce(rows)
                gradient = rows[0 if shard is None else shard.index]
            expected = gradients[name] if shard is None else shard.of(gradients[name])
            errors[name] = float((gradient - expected).abs().max())
    return errors


def all_unit_errors(rank: int) -> list[tuple[str, dict[str, float]]]:
    return [
        (f"{name}, {lengths}", unit_errors(rank, config, lengths))
        for name, config in CONFIGS.items()
        for lengths in LENGTHS
    ]


@pytest.mark.shows(84, 85)
@pytest.mark.parametrize("size", [2, 4])
def test_each_unit_is_the_part_of_the_whole_one(size: int) -> None:
    for by_case in run_ranks(size, all_unit_errors):
        assert len(by_case) == len(CONFIGS) * len(LENGTHS)
        for case, errors in by_case:
            assert {"embedding output", "layers.0.mlp input", "head output", "layers.0.attention.k.bias"} <= set(errors)
            for what, error in errors.items():
                assert error <= TOLERANCE, (case, what, error)


# ---- logits


def logits_errors(rank: int) -> dict[str, float]:
    """Losses, log-probabilities, entropies and gradients of this rank's part, against those of the whole logits."""
    group = dist.group.WORLD
    errors = {}
    for dtype, temperature in ((torch.float64, 1.0), (torch.float64, 0.7), (torch.float32, 1.3), (torch.bfloat16, 1.0)):
        generator = torch.Generator().manual_seed(4)
        whole = (3 * torch.randn(9, 41, generator=generator)).to(dtype).requires_grad_()
        labels = torch.randint(0, 41, (9,), generator=generator)
        labels[3] = -100
        ledger = Ledger()
        part = Shard("tp", 0, rank, 3, (41, 16))
        own = whole.detach()[:, part.start : part.start + part.length].clone().requires_grad_()
        sharded = ShardedLogits(own, part, Collectives(group, ledger))
        weights = torch.randn(2, 9, generator=generator)
        found, expected = token_statistics(sharded, labels, temperature), token_statistics(whole, labels, temperature)
        loss, wanted = cross_entropy_sum(sharded, labels), cross_entropy_sum(whole, labels)
        ((found.log_probs * weights[0]).sum() + (found.entropies * weights[1]).sum() + loss).backward()
        ((expected.log_probs * weights[0]).sum() + (expected.entropies * weights[1]).sum() + wanted).backward()
        assert own.grad is not None and whole.grad is not None
        key = f"{dtype}, {temperature}: "
        errors[key + "loss"] = float((loss - wanted).detach().abs())
        errors[key + "log-probs"] = float((found.log_probs - expected.log_probs).detach().abs().max())
        errors[key + "entropies"] = float((found.entropies - expected.entropies).detach().abs().max())
        of_part = whole.grad[:, part.start : part.start + part.length]
        errors[key + "gradient"] = float((own.grad - of_part).abs().max())
        # Three numbers a token for each of the two calls, and nothing more.
        words = 9 * 3 * max(4, own.element_size())
        assert ledger.launched == [(CollectiveKind.ALL_GATHER, words)] * 2
        assert torch.equal(sharded.gathered(), whole.detach())
    return errors


@pytest.mark.shows(84)
def test_losses_of_shared_logits_are_those_of_the_whole_which_are_never_gathered() -> None:
    # bf16 has 8 bits of a gradient of size one; in fp32 a handful of roundings at size ten.
    tolerances = {"torch.float64": 1e-12, "torch.float32": 2e-5, "torch.bfloat16": 2e-2}
    for errors in run_ranks(3, logits_errors):
        assert len(errors) == 16
        for what, error in errors.items():
            assert error <= tolerances[what.partition(",")[0]], (what, error)


# ---- what a rank holds


def test_units_made_for_nobody_else_are_refused_where_ranks_share_them() -> None:
    from penstock.engine.options import units_for

    with pytest.raises(ValueError, match=r"dp=1 x pp=1 x cp=1 x tp=2 shares a model .* give a function"):
        units_for(decoder_units(CONFIG), ModelGroups(), Layout(tp=2))

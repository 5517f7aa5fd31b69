"""Microbatches: how many, which one, of which step, and what comes back of each; as in a plain loop in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, Layout, Metric, MicroBatchSpec, PackedBatch, PerToken
from penstock.data import split
from penstock.engine import num_loss_tokens, token_cross_entropy
from penstock.settings import TrainConfig
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Asks(Block):
    """Keeps for all microbatches of a step what it made of its weight in the first, and mixes in its numbers."""

    def forward(self, x: Tensor, microbatch: int, *, step: int, num_microbatches: int = 0) -> Tensor:
        if microbatch == 0:
            self.kept = self.linear.weight.detach().round(decimals=1) * step
        mixed = super().forward(x) * (1.0 + 0.1 * microbatch) + x @ self.kept
        return mixed * 0.5 if microbatch == num_microbatches - 1 else mixed


def layers(block: type[Block] = Block) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Embedding(VOCAB, WIDTH), *(block() for _ in range(4)), nn.Linear(WIDTH, VOCAB)]


def batch_of(num: int, seed: int = 0) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 9, (num,), generator=generator).tolist()
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths])


def outputs_of(model: Sequence[nn.Module], microbatches: Sequence[PackedBatch], step: int) -> list[Tensor]:
    """The logits of a plain loop, in which layers are given by hand what they ask for."""
    found = []
    for number, microbatch in enumerate(microbatches):
        x = microbatch["tokens"]
        for layer in model:
            x = layer(x, number, step=step, num_microbatches=len(microbatches)) if isinstance(layer, Asks) else layer(x)
        found.append(x)
    return found


def plainly(
    microbatches: Sequence[PackedBatch],
    denominator: float | None = None,
    step: int = 1,
    block: type[Block] = Block,
    loss_fn: Any = token_cross_entropy,
) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of a plain loop in one process; a loss of one's own is given its numbers."""
    model, losses = nn.ModuleList(layers(block)), []
    denominator = denominator or sum(map(num_loss_tokens, microbatches))
    for number, (output, own) in enumerate(zip(outputs_of(list(model), microbatches, step), microbatches, strict=True)):
        loss = loss_fn(output, own) if block is Block else loss_fn(output, own, step=step, microbatch=number)
        losses.append(loss * (1.0 / denominator))
    for loss in losses:
        loss.backward()
    total = torch.stack([loss.detach() for loss in losses]).sum()
    gradients = {name: own.grad for name, own in model.named_parameters()}
    return float(total), {name: own.tolist() for name, own in gradients.items() if own is not None}


def gradients_of(engine: Engine) -> dict[str, Any]:
    return {name.removeprefix("layers."): engine.gradient(name).tolist() for name in engine.parameters()}


def engine_of(pp: int, schedule: str, block: type[Block] = Block, recompute: str = "none") -> Engine:
    """An engine whose weights stay as they are."""
    options = EngineOptions(schedule, timeout_s=30.0, recompute=recompute)
    still = partial(torch.optim.SGD, lr=0.0)
    return Engine.from_layers(layers(block), WIDTH, Layout(pp=pp), options, optimizer=still)


# ---- their number where none is given


NUMS = (19, 5)


def left_out(rank: int, pp: int) -> list[Any]:
    """Of each batch: loss and gradients of a step, then the loss of an evaluation, and scores."""
    engine, found = engine_of(pp, "1f1b"), []
    for num in NUMS:
        # Before any step has changed the weights.
        scores = engine.forward(batch_of(num), lambda logits, m: logits.sum(), list, broadcast=True)
        found += [float(engine.evaluate([batch_of(num)])), [float(score) for score in scores]]
    taken = engine.train_batch(batch_of(NUMS[0]))
    return [*found, taken.num_microbatches, taken.loss, gradients_of(engine)]


@pytest.mark.shows(177)
def test_as_many_where_none_is_given_whatever_the_layout() -> None:
    default = TrainConfig().num_microbatches
    wanted = left_out(0, 1)
    parts = split(batch_of(NUMS[0]), MicroBatchSpec(num=default)).microbatches
    loss, gradients = plainly(parts)
    assert wanted[-3:] == [default, loss, gradients] and len(wanted[1]) == default and len(wanted[3]) == NUMS[1]
    for pp in (2, 3):
        by_rank = run_ranks(pp, left_out, pp)
        assert [own[:-1] for own in by_rank] == [wanted[:-1]] * pp
        assert {name: own for found in by_rank for name, own in found[-1].items()} == gradients


# ---- which microbatch, of which step


NUM = 6
SPEC = MicroBatchSpec(num=NUM)
# Fused pairs, split backwards and recomputation; with three ranks a layer in each stage.
CASES = {
    1: [("1f1b", "none")],
    2: [("interleaved", "full"), ("combined-1f1b", "full"), ("zb-v", "none")],
    3: [("1f1b", "full"), ("zb-v", "none")],
}


def numbered_loss(output: Tensor, batch: PackedBatch, step: int, *, microbatch: int) -> Tensor:
    return token_cross_entropy(output, batch) * (step + 0.25 * microbatch)


def numbered_hook(logits: Tensor, microbatch: PackedBatch, step: int, num_microbatches: int) -> Tensor:
    return logits * step + num_microbatches


def numbered(rank: int, pp: int) -> list[list[Any]]:
    """Of each case: scores, an evaluation and two steps."""
    found = []
    for schedule, recompute in CASES[pp]:
        engine = engine_of(pp, schedule, Asks, recompute)
        first = engine.train_batch(batch_of(NUM), numbered_loss, micro_batches=SPEC, step=3)
        own = [first.loss, gradients_of(engine)]
        own.append(float(engine.evaluate([batch_of(NUM)], numbered_loss, micro_batches=SPEC)))
        for hook in (numbered_hook, PerToken(numbered_hook)):
            own.append(engine.forward(batch_of(NUM), hook, list, micro_batches=SPEC, broadcast=True))
        second = engine.train_batch(batch_of(NUM, 1), partial(numbered_loss, step=2), micro_batches=SPEC)
        found.append([*own, second.loss, gradients_of(engine)])
        engine.close()
    return found


@pytest.mark.shows(178)
@pytest.mark.parametrize("pp", CASES)
def test_layers_losses_and_hooks_are_given_the_numbers_that_they_ask_for(pp: int) -> None:
    by_rank = [numbered(0, 1)] if pp == 1 else run_ranks(pp, numbered, pp)
    first, second = (split(batch_of(NUM, seed), SPEC).microbatches for seed in range(2))
    scores = [logits * 3 + NUM for logits in outputs_of(layers(Asks), first, 3)]
    loss, gradients = plainly(first, step=3, block=Asks, loss_fn=numbered_loss)
    total, _ = plainly(first, denominator=1.0, step=3, block=Asks, loss_fn=numbered_loss)
    evaluated = total / sum(map(num_loss_tokens, first))

    def second_loss(output: Tensor, batch: PackedBatch, step: int, microbatch: int) -> Tensor:
        return numbered_loss(output, batch, 2, microbatch=microbatch)

    bound, later = plainly(second, step=4, block=Asks, loss_fn=second_loss)
    for number, case in enumerate(CASES[pp]):
        own = [found[number] for found in by_rank]
        for place, expected in ((0, loss), (2, evaluated), (5, bound)):
            assert [found[place] for found in own] == [expected] * pp, case
        for place, expected in ((1, gradients), (6, later)):
            assert {name: value for found in own for name, value in found[place].items()} == expected, case
        for found in own:
            assert all(map(torch.equal, found[3], scores)) and all(map(torch.equal, found[4], scores)), case


# ---- what a loss gives beside


def telling_loss(output: Tensor, batch: PackedBatch, microbatch: int) -> Any:
    """The loss, and one of several things beside it."""
    loss, beside = token_cross_entropy(output, batch), {"logits": output, "sequences": list(batch.sequence_lengths())}
    # torch conjugates it by a mark.
    beside["turned"] = torch.complex(output, output).conj()
    beside["place"] = (microbatch, [(), {"odd": (microbatch % 2,)}])
    if microbatch == 2:
        return loss, {"tokens": Metric(batch.num_tokens)}
    return (loss, output) if microbatch == 1 else (loss, {**beside, "tokens": Metric(batch.num_tokens)})


def object_loss(output: Tensor, batch: PackedBatch) -> tuple[Tensor, Any]:
    return token_cross_entropy(output, batch), MicroBatchSpec(num=len(batch.ids))


def told(rank: int, pp: int, schedules: Sequence[str]) -> list[list[Any]]:
    """Of each schedule: what a step and an evaluation of two batches gave, the step's loss, and what all ranks have."""
    found = []
    for schedule in schedules:
        engine = engine_of(pp, schedule)
        step = engine.train_batch(batch_of(NUM), telling_loss, micro_batches=SPEC)
        fewer = MicroBatchSpec(num=NUM, allow_fewer=True)
        evaluated = engine.evaluate([batch_of(NUM), batch_of(4, 1)], telling_loss, micro_batches=fewer)
        assert not any(own.requires_grad for own in tensors_of([step.outputs, evaluated.outputs]))
        assert step.metrics == {"tokens": float(sum(own.num_tokens for i, own in enumerate(parts(0)) if i != 1))}
        shared = [list(engine.share_outputs(given.outputs)) for given in (step, evaluated)]
        plain = engine.train_batch(batch_of(NUM), micro_batches=SPEC)
        assert plain.outputs == () and engine.share_outputs(()) == () and plain.loss == step.loss
        objects = engine.train_batch(batch_of(NUM), object_loss, micro_batches=SPEC).outputs
        with pytest.raises(TypeError, match="a MicroBatchSpec cannot be saved or sent"):
            engine.share_outputs(objects)
        with pytest.raises(TypeError, match=r"a tensor of layout torch\.sparse_coo cannot be saved or sent"):
            engine.share_outputs([torch.eye(2).to_sparse()])
        found.append([list(step.outputs), list(evaluated.outputs), *shared, step.loss, list(objects)])
        engine.close()
    return found


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return tensors_of(list(value.values()))
    if isinstance(value, list | tuple):
        return [tensor for inner in value for tensor in tensors_of(inner)]
    return [value] if isinstance(value, Tensor) else []


def parts(seed: int) -> Sequence[PackedBatch]:
    """Those of the first batch, or of the second, which is smaller."""
    num = 4 if seed else NUM
    return split(batch_of(num, seed), MicroBatchSpec(num=num)).microbatches


def expected(seed: int) -> list[Any]:
    """What `telling_loss` gives in a plain loop, but for its metrics."""
    found = []
    for number, (logits, own) in enumerate(zip(outputs_of(layers(), parts(seed), 1), parts(seed), strict=True)):
        logits = logits.detach()
        whole = {"logits": logits, "sequences": list(own.sequence_lengths())}
        whole["turned"] = torch.complex(logits, -logits)
        whole["place"] = (number, [(), {"odd": (number % 2,)}])
        found.append([whole, logits, None][number if number in (1, 2) else 0])
    return found


def same(one: Any, other: Any) -> bool:
    return (
        len(one) == len(other)
        and all(map(torch.equal, tensors_of(one), tensors_of(other)))
        and [type(own) for own in one] == [type(own) for own in other]
        and [type(own) is dict and own["place"] for own in one] == [type(own) is dict and own["place"] for own in other]
    )


@pytest.mark.shows(179)
@pytest.mark.parametrize(
    ("pp", "schedules"), [(1, ("1f1b",)), (2, ("combined-1f1b", "dualpipe", "interleaved")), (3, ("1f1b", "zb-v"))]
)
def test_what_a_loss_gives_beside_comes_back_by_microbatch(pp: int, schedules: Sequence[str]) -> None:
    by_rank = [told(0, 1, schedules)] if pp == 1 else run_ranks(pp, told, pp, schedules)
    first, both, (loss, _) = expected(0), expected(0) + expected(1), plainly(parts(0))
    for number, schedule in enumerate(schedules):
        own = [found[number] for found in by_rank]
        steps, evaluations, objects = ([found[place] for found in own] for place in (0, 1, 5))
        assert all(same(found[2], first) and same(found[3], both) for found in own), schedule
        assert all(found[4] == loss for found in own) or schedule == "dualpipe"
        assert [own for given in reversed(objects) for own in given] == [MicroBatchSpec(num=1)] * NUM, schedule
        assert [len(given) for given in evaluations].count(0) == pp - 1, schedule
        if schedule == "dualpipe":
            assert [len(given) for given in steps] == [NUM // 2, NUM // 2]
        else:
            assert sorted(map(len, steps)) == [0] * (pp - 1) + [NUM], schedule

"""A rehearsal finds what a step on devices would stumble over, and what each unit takes."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.engine.own_layers import units_of_layers
from penstock.engine.rehearsal.step import RehearsedBatch, rehearse, rehearse_run
from penstock.engine.training.loss import token_cross_entropy
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.parallel.collectives import Collectives
from penstock.schedule import Op
from penstock.schedule.rehearsal import MemoryKind, Rehearsal, RehearsalError, check_order
from penstock.settings import DataConfig, ExpertConfig, Layout, ModelConfig, ParallelConfig, Precision, RunConfig

WIDTH, WORDS = 8, 16
CONFIG = ModelConfig(vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=24, num_layers=2, num_heads=2)
BATCH = RehearsedBatch([24] * 2, MicroBatchSpec(num=2))


def run(layers: Callable[[], list[nn.Module]], batch: RehearsedBatch = BATCH, pp: int = 1) -> Rehearsal:
    with torch.device("meta"):
        units = units_of_layers(layers())
    return rehearse(units, WIDTH, Layout(pp=pp), EngineOptions("1f1b"), batch)


class Applied(nn.Module):
    """A linear layer, and what a function makes of its output."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


class ReadInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * float(grads[0].abs().max())


def layers_with(act: Callable[[Tensor], Tensor]) -> Callable[[], list[nn.Module]]:
    return lambda: [nn.Embedding(WORDS, WIDTH), Applied(act), nn.Linear(WIDTH, WORDS)]


def clipped_if_large(x: Tensor) -> Tensor:
    return x.clamp(-1, 1) if x.abs().max() > 1 else x


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "a value read by item": (lambda x: x / x.sum().item(), "0F0.*the host reads a value"),
    "a branch on a value": (clipped_if_large, "0F0.*the host reads a value"),
    "a list of values": (lambda x: x * x.detach()[:, 0].tolist()[0], "0F0.*the host reads a value"),
    "a copy to the host": (lambda x: x + x.detach().cpu().mean().to(x.device), "0F0.*copied to the host"),
    "a copy from the host": (lambda x: x + torch.ones(WIDTH).to(x.device), "0F0.*copied to the device"),
    "a value read in backward": (ReadInBackward.apply, "0B0.*the host reads a value"),
    "rows chosen by a mask": (lambda x: x + x[x[:, 0] > 0].mean(0), "0F0.*needs the data of a tensor"),
    "a tensor left on the host": (
        lambda x: x + torch.arange(x.shape[0])[:, None],
        "0F0.*devices.*meta.*cpu.*the host's tensors are 'cpu'",
    ),
    "widths that do not meet": (lambda x: x @ x.new_ones(WIDTH + 1, WIDTH), "0F0.*reduction dim"),
    "types that do not meet": (
        lambda x: x @ x.new_ones(WIDTH, WIDTH, dtype=torch.float64),
        "0F0.*float32 and torch.float64",
    ),
    "an input changed that backward needs": (lambda x: x.exp().mul_(2), "0B0.*modified by an inplace operation"),
}


@pytest.mark.shows(144)
@pytest.mark.parametrize(("act", "message"), FAULTS.values(), ids=FAULTS)
def test_a_fault_that_a_cpu_may_forgive_is_found_and_its_action_named(
    act: Callable[[Tensor], Tensor], message: str
) -> None:
    with pytest.raises(RehearsalError, match=message):
        run(layers_with(act))


def test_layers_without_a_fault_pass() -> None:
    assert run(layers_with(torch.tanh)).peak_bytes > 0


@pytest.mark.parametrize("num_first", [1, 2])
def test_the_cut_and_the_schedule_of_measured_times_are_rehearsed(num_first: int) -> None:
    given_cut = (range(num_first), range(num_first, 3)), EngineOptions("afab").choice
    found = run(layers_with(torch.tanh), replace(BATCH, given_cut=given_cut), pp=2)
    assert [unit.name for unit in found.units] == ["layers.0", "layers.1"][:num_first]
    assert found.schedule == EngineOptions("afab").choice.program(2, 2).schedule.name


def test_a_loss_of_labels_is_rehearsed_without_values() -> None:
    batch = replace(BATCH, loss_fn=nn.CrossEntropyLoss())
    assert run(layers_with(torch.tanh), batch).peak_bytes >= run(layers_with(torch.tanh)).peak_bytes > 0


def test_a_value_read_by_a_loss_is_found() -> None:
    def loss_fn(output: Tensor, microbatch: PackedBatch) -> Tensor:
        loss = token_cross_entropy(output, microbatch)
        return loss / float(loss.detach())

    with pytest.raises(RehearsalError, match=r"0F0.*the host reads a value"):
        run(layers_with(torch.tanh), replace(BATCH, loss_fn=loss_fn))


class Summing(nn.Module):
    """Sums over expert-parallel ranks; the last of them, planted wrong, does so once more or with other sizes."""

    def __init__(self, groups: ModelGroups, fault: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.collectives, self.fault = Collectives(groups.ep), fault if groups.ep_rank else ""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.fault == "order":
            self.collectives.all_gather(y.detach()).wait()
        total = self.collectives.all_reduce(y.detach()[1:] if self.fault == "size" else y.detach()).wait()
        if self.fault != "order":
            self.collectives.all_gather(y.detach()).wait()
        return y + total.mean()


@pytest.mark.shows(144)
@pytest.mark.parametrize("fault", ["", "order", "size"])
def test_collectives_that_ranks_launch_differently_are_found(fault: str) -> None:
    def units(groups: ModelGroups) -> list[UnitSpec]:
        first, _, last = units_of_layers(layers_with(torch.tanh)())
        return [first, replace(first, name="summing", build=lambda: Summing(groups, fault), limits=None), last]

    found = []
    for rank in range(2):
        with torch.device("meta"):
            found.append(rehearse(units, WIDTH, Layout(dp=2, ep=2), EngineOptions("1f1b"), BATCH, rank))
    if not fault:
        check_order(found)
        return
    with pytest.raises(RehearsalError, match=r"collective 1 of the step is all-reduce of .* on rank 0 and .* rank 1"):
        check_order(found)


def rehearsed(layout: Layout, rank: int = 0, **options: Any) -> Rehearsal:
    settings = EngineOptions(options.pop("schedule", "1f1b"), **options)
    return rehearse(lambda groups: decoder_units(CONFIG, groups=groups), WIDTH, layout, settings, BATCH, rank)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_units_add_up_to_the_actions_of_their_stage(device: str) -> None:
    found = rehearsed(Layout(pp=2), device=device, schedule="zb-h1")
    by_action = {point.action: point for point in found.timeline}
    for op in (Op.F, Op.I, Op.W):
        assert sum(unit.of(op).flops for unit in found.units) == by_action[f"0{op.name}0"].flops
    assert all(unit.of(Op.B).flops == unit.of(Op.I).flops + unit.of(Op.W).flops for unit in found.units)
    assert found.flops > 0


def test_recomputing_is_arithmetic_instead_of_memory() -> None:
    plain, again = rehearsed(Layout(pp=2)), rehearsed(Layout(pp=2), recompute="full")
    assert again.most(MemoryKind.TAPE) < 0.5 * plain.most(MemoryKind.TAPE)
    assert again.flops > 1.2 * plain.flops


def test_the_first_rank_is_rehearsed_where_none_is_named() -> None:
    config = RunConfig(model=CONFIG, data=DataConfig(sequence_length=24), parallel=ParallelConfig(pp=2, device="cpu"))
    assert str(rehearse_run(config)) == str(rehearse_run(config, 0)) != str(rehearse_run(config, 1))


def test_any_rank_of_a_layout_of_thousands_can_be_rehearsed() -> None:
    layout = Layout(pp=2, dp=1024, cp=2, tp=2)
    found = rehearsed(layout, layout.world_size - 1, precision=Precision.BF16, device="cuda")
    assert found.place == "dp 1023, pp 1, cp 1, tp 1"
    assert {one.axis for one in found.collectives} >= {"tp", "cp", "dp,cp"}
    assert {one.num_ranks for one in found.collectives if one.axis == "dp,cp"} == {2048}


WIDER = ModelConfig(
    vocab_size=WORDS,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    max_length=64,
)
ROUTED = replace(WIDER, experts=ExpertConfig(num_experts=4, num_active=2, intermediate_size=24))


@pytest.mark.parametrize(
    ("config", "layout"),
    [(WIDER, Layout()), (WIDER, Layout(cp=2)), (ROUTED, Layout(dp=2, ep=2))],
    ids=["dense", "a ring", "experts"],
)
def test_a_gpus_kernels_have_the_arithmetic_of_a_cpus(config: ModelConfig, layout: Layout) -> None:
    on_cpu = arithmetic(config, layout, "cpu")
    assert all(flops > 0 for (name, op), flops in on_cpu.items() if name != "embedding")
    assert arithmetic(config, layout, "cuda") == on_cpu


def arithmetic(config: ModelConfig, layout: Layout, device: Literal["cpu", "cuda"]) -> dict[tuple[str, Op], float]:
    """By unit and action the operations of a rehearsed microbatch of 64 tokens."""
    options = EngineOptions("1f1b", device=device, precision=Precision.BF16)
    batch = RehearsedBatch([64] * 2, MicroBatchSpec(num=2))
    found = rehearse(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options, batch)
    return {(unit.name, op): unit.of(op).flops for unit in found.units for op in (Op.F, Op.B, Op.I, Op.W)}


def test_every_row_goes_through_a_rehearsed_expert() -> None:
    """Two experts of half the width do the work of the dense layer, and there is the router."""
    dense, routed = (arithmetic(config, Layout(), "cpu")["layers.0.mlp", Op.F] for config in (WIDER, ROUTED))
    assert routed - dense == 2 * 64 * 32 * 4

"""Our exported schedules under torch's own pipelining runtime: the losses and gradients of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.schedule import Placement, Program, build, lower, to_csv
from tests.dist.launch import run_ranks

RANKS, MICROBATCHES, ROWS, HIDDEN = 2, 6, 3, 8
NAMES = ("1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min")
# torch runs fused pairs one half after the other.
FUSED = ("dualpipe-v", "combined-interleaved")


def layer(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()).double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, target = (torch.randn(MICROBATCHES * ROWS, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, target


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum()


def step_of_torch(rank: int, files: list[tuple[str, str, Placement]]) -> list[dict[str, Any]]:
    """For each file one step: the losses on the rank of the last stage, the gradients of the rank's own stages."""
    return [_step(rank, path, form, placement) for path, form, placement in files]


def _step(rank: int, path: str, form: Any, placement: Placement) -> dict[str, Any]:
    # In the ranks alone: it takes a second, of whoever only collects tests too.
    from torch.distributed.pipelining import PipelineStage, schedules

    homes = {stage: placement.rank_of(stage) for stage in range(placement.num_stages)}
    stages = []
    for number in placement.stages_of(rank):
        # From these torch knows what is sent, and whether its gradient comes back.
        into = torch.zeros(ROWS, HIDDEN, dtype=torch.float64, requires_grad=number > 0)
        out = torch.zeros(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
        device = torch.device("cpu")
        stage = PipelineStage(layer(number), number, placement.num_stages, device, input_args=into, output_args=out)
        stage.stage_index_to_group_rank = homes
        stages.append(stage)
    runtime = schedules._PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    runtime.stage_index_to_group_rank = homes
    runtime._load_csv(path, format=form)
    x, target = batch()
    losses: list[Tensor] = []
    has_last = homes[placement.num_stages - 1] == rank
    arguments = (x,) if rank == 0 else ()
    runtime.step(*arguments, target=target if has_last else None, losses=losses if has_last else None)
    gradients = {
        (number, name): parameter.grad
        for number, stage in zip(placement.stages_of(rank), stages)
        for name, parameter in stage.submod.named_parameters()
    }
    return {"losses": torch.stack(losses).tolist() if has_last else None, "gradients": gradients}


def step_of_one_process(num_stages: int) -> dict[str, Any]:
    layers = [layer(stage) for stage in range(num_stages)]
    losses = []
    for x, target in zip(*(part.chunk(MICROBATCHES) for part in batch())):
        loss = loss_of(nn.Sequential(*layers)(x), target)
        loss.backward()
        losses.append(loss.item())
    gradients = {(at, name): p.grad for at, one in enumerate(layers) for name, p in one.named_parameters()}
    return {"losses": losses, "gradients": gradients}


def files_of(names: tuple[str, ...], folder: Path) -> list[tuple[str, str, Program]]:
    """Each schedule in both of torch's forms."""
    files = []
    for name in names:
        program = lower(build(name, ranks=RANKS, microbatches=MICROBATCHES), shared_channels=True)
        for plan, form in ((program.schedule, "compute_only"), (program, "compute_comms")):
            path = folder / f"{name}.{form}.csv"
            path.write_text(to_csv(plan))
            files.append((str(path), form, program))
    return files


@pytest.mark.parametrize("names", [NAMES, FUSED], ids=["separate", "fused"])
def test_torch_runs_our_schedules_to_the_result_of_one_process(names: tuple[str, ...], tmp_path: Path):
    files = files_of(names, tmp_path)
    given = [(path, form, program.placement) for path, form, program in files]
    ranks = run_ranks(RANKS, step_of_torch, given, timeout_s=60)
    assert len(files) == 2 * len(names)
    for at, (_, _, program) in enumerate(files):
        expected = step_of_one_process(program.placement.num_stages)
        (losses,) = [rank[at]["losses"] for rank in ranks if rank[at]["losses"] is not None]
        assert losses == expected["losses"]
        gradients = ranks[0][at]["gradients"] | ranks[1][at]["gradients"]
        assert gradients.keys() == expected["gradients"].keys()
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected["gradients"][key])

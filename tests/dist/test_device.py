"""One rule for scripts and commands: the ranks of an engine, or of a run, agree on their devices at first."""

import contextlib
import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from penstock import Engine, Layout
from penstock.cli.processes.meeting import Group
from penstock.cli.processes.session import Meeting
from penstock.runtime.transport import default_store
from penstock.settings import Device, ParallelConfig
from tests.dist.launch import run_ranks


def one_gpu() -> None:
    """This process sees the one GPU of its host."""
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="GPU-1")
    torch.backends.cuda.is_built = lambda: True


def of_engine(rank: int, wanted: Device) -> tuple[str, str]:
    """The device of an engine, or its refusal; and what is said on standard error."""
    one_gpu()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            engine = Engine.from_layers(
                [torch.nn.Embedding(4, 4), torch.nn.Linear(4, 4)], 4, Layout(pp=2), device=wanted
            )
        except ValueError as error:
            return str(error), said.getvalue()
        device = str(engine.grid.device)
        engine.close()
    return device, said.getvalue()


def of_command(rank: int, wanted: Device) -> tuple[str, str]:
    """The same of a process of a command."""
    one_gpu()
    group = Group(rank, 2, rank, "", 0, "")
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            device = Meeting(default_store(), group).choose_device(ParallelConfig(device=wanted)).device
        except ValueError as error:
            return str(error), said.getvalue()
    return device, said.getvalue()


@pytest.mark.shows(193)
@pytest.mark.parametrize("way", [of_engine, of_command])
def test_two_ranks_on_one_gpu_are_refused_on_both_or_compute_on_the_cpu(way: Callable[..., tuple[str, str]]) -> None:
    (first, silent), (second, _) = run_ranks(2, way, "cuda")
    assert first == second and not silent
    assert "rank 1 on" in first and "has the same GPU as rank 0 on" in first and "(uuid GPU-1)" in first
    (first, said), (second, silent) = run_ranks(2, way, "auto")
    assert first == second == "cpu" and not silent
    assert said.startswith("penstock: all ranks compute on the CPU, since rank 1 on") and said.count("\n") == 1

"""Which device each rank takes, on hosts and under launchers that this machine is not: their GPUs are made up."""

import platform
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.parallel.device import agree_on_device
from penstock.settings import ConfigError, Device, TransportKind

pytestmark = pytest.mark.shows(193)

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@dataclass
class Process:
    """A process, and what it sees: GPUs by uuid, the variables of its launcher, the GPU that its script has chosen."""

    gpus: str = "ab"
    local_rank: int | None = None
    host: str = "north"
    wanted: Device = "auto"
    current: int = 0
    variable: str = "LOCAL_RANK"
    is_built: bool = True
    transport: TransportKind = "auto"

    def enter(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("LOCAL_RANK", "SLURM_LOCALID"):
            patch.delenv(name, raising=False)
        if self.local_rank is not None:
            patch.setenv(self.variable, str(self.local_rank))
        patch.setattr(platform, "node", lambda: self.host)
        patch.setattr(torch.backends.cuda, "is_built", lambda: self.is_built)
        cuda = {
            "is_available": lambda: bool(self.gpus),
            "device_count": lambda: len(self.gpus),
            "current_device": lambda: self.current,
            "get_device_properties": lambda device: SimpleNamespace(uuid=self.gpus[device]),
            "set_device": lambda device: setattr(self, "current", device.index),
        }
        for name, ours in cuda.items():
            patch.setattr(torch.cuda, name, ours)


def agreed(*processes: Process) -> list[torch.device | str]:
    """The device of each process, or the sentence with which it refuses."""
    views: list[Any] = []
    found: list[torch.device | str] = []

    def show(view: Any) -> list[Any]:
        views.append(view)
        raise InterruptedError

    for rank, process in enumerate(processes):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(InterruptedError):
            process.enter(patch)
            agree_on_device(process.wanted, show, rank, process.transport)
    for rank, process in enumerate(processes):
        with pytest.MonkeyPatch.context() as patch:
            process.enter(patch)
            try:
                found.append(agree_on_device(process.wanted, lambda _: views, rank, process.transport))
            except ConfigError as error:
                found.append(str(error))
            else:
                assert not isinstance(found[-1], torch.device) or found[-1] in (
                    CPU,
                    torch.device("cuda", process.current),
                )
    return found


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID"])
@pytest.mark.parametrize("wanted", ["auto", "cuda"])
def test_each_rank_takes_the_gpu_of_its_local_rank(wanted: Device, variable: str) -> None:
    ranks = [Process(local_rank=n, wanted=wanted, variable=variable, host=host) for host in "xy" for n in range(2)]
    assert agreed(*ranks) == [FIRST, SECOND] * 2
    assert [rank.current for rank in ranks] == [0, 1, 0, 1]


def test_a_process_that_sees_one_gpu_takes_it_whatever_its_local_rank() -> None:
    assert agreed(Process("a", 0), Process("b", 1), Process("c", 2)) == [FIRST] * 3


def test_a_gpu_that_the_process_has_chosen_stays() -> None:
    assert agreed(Process("abc", 0, current=1), Process("abc", 1, current=2)) == [SECOND, torch.device("cuda", 2)]


def test_two_ranks_on_one_gpu_are_refused_in_one_sentence_on_both() -> None:
    first, second = agreed(Process(wanted="cuda"), Process(wanted="cuda"))
    assert first == second
    assert first == (
        'device = "cuda" on rank 0 on north with cuda:0, but rank 1 on north with cuda:0 has the same GPU as rank 0 on '
        "north with cuda:0 (uuid a); start as many ranks on each host as it has GPUs, each with a LOCAL_RANK or "
        'torch.cuda.set_device() of its own, set device to "cpu" on all, or share GPUs with transport = "host"'
    )


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Process("", 1, "south", "cuda"), "rank 1 on south finds no GPU"),
        (Process("", 1, "south"), "rank 1 on south finds no GPU"),
        (Process("b", 1, "south", "cpu"), 'rank 1 on south was given device = "cpu"'),
        (Process("ba", 3, wanted="cuda"), "rank 1 on north with cuda:1 has the same GPU as rank 0"),
    ],
    ids=["demanded", "auto", "cpu", "shared"],
)
def test_a_gpu_on_one_rank_alone_is_refused_where_it_is_demanded(other: Process, why: str) -> None:
    first, second = agreed(Process("a", 0, wanted="cuda"), other)
    assert isinstance(first, str) and first == second
    assert first.startswith('device = "cuda" on rank 0 on north with cuda:0, but') and why in first


def test_gpus_of_equal_number_on_two_hosts_are_two() -> None:
    assert agreed(Process("a", 0), Process("a", 0, host="south")) == [FIRST] * 2


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (Process("", 1), "rank 1 on north finds no GPU"),
        (Process("a", 1), "rank 1 on north with cuda:0 has the same GPU as rank 0 on north with cuda:0 (uuid a)"),
        (Process("b", 1, wanted="cpu"), 'rank 1 on north was given device = "cpu"'),
    ],
)
def test_on_auto_all_ranks_take_the_cpu_where_one_lacks_a_gpu_and_the_first_says_so_once(
    other: Process, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert agreed(Process("a", 0), other, Process("c", 2)) == [CPU] * 3
    assert capsys.readouterr().err == f"penstock: all ranks compute on the CPU, since {said}\n"


def test_the_cpu_says_nothing_where_it_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert agreed(Process(wanted="cpu"), Process(wanted="cpu")) == [CPU] * 2
    assert agreed(Process("", is_built=False), Process("", is_built=False)) == [CPU] * 2
    assert not capsys.readouterr().err


@pytest.mark.shows(194)
def test_ranks_share_a_gpu_where_tensors_travel_through_host_memory() -> None:
    ranks = [Process("ab", n, wanted="cuda", transport="host") for n in range(4)]
    assert agreed(*ranks) == [FIRST, SECOND] * 2
    assert agreed(Process("a", 0, transport="host"), Process("a", 1, transport="host")) == [FIRST] * 2


@pytest.mark.shows(194)
def test_ranks_with_another_transport_are_refused() -> None:
    told = 'rank 0 was given transport = "auto", but rank 1 "host"; give all the same'
    assert agreed(Process(wanted="cpu"), Process(wanted="cpu", transport="host")) == [told] * 2

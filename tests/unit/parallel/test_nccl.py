"""What is asked of NCCL, shown without a GPU: torch's class is stood in for by one that notes its calls."""

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock import schedule
from penstock.parallel import renewable
from penstock.parallel.renewable import RenewableGroup, cut_off, nccl_options
from penstock.runtime.transport import in_rounds
from penstock.schedule import Direction, Op, parts
from penstock.schedule.builders.registry import names
from penstock.schedule.rules import Wire, channels_of

BUILDERS = [name for name in names() if name not in ("auto", "inference")]
#: the multiprocessors of the smallest of today's devices that many users have, an A100
NUM_SMS = 108


class FakeNCCL:
    """A backend of NCCL's that notes in `calls` what is done to it."""

    calls: list[str]

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(min_ctas=None, max_ctas=None)
            self.is_high_priority_stream = False

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def abort(self) -> None:
        self.calls.append("nccl aborts")

    def _group_start(self) -> None:
        self.calls.append("group starts")

    def _group_end(self) -> None:
        self.calls.append("group ends")


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renewable, "NCCL", FakeNCCL)


class Link:
    """A communicator of some backends."""

    def __init__(self, *backends: Any) -> None:
        self._backends = backends

    def backends(self) -> Sequence[Any]:
        return self._backends

    def renew(self, generation: int) -> None:
        raise NotImplementedError


@pytest.mark.shows(206)
def test_gloo_is_cut_first_and_all_of_nccl_as_one() -> None:
    calls: list[str] = []
    gloo: Any = SimpleNamespace(abort=lambda: calls.append("host"))
    group: Any = SimpleNamespace(backend=FakeNCCL(calls))
    of_grid = Link(*RenewableGroup.backends(group))
    cut_off([of_grid, Link(FakeNCCL(calls), gloo), Link(gloo), Link(FakeNCCL(calls))])
    aborts = ["nccl aborts"] * 3
    assert calls == ["host", "host", "group starts", *aborts, "group ends"]


@pytest.mark.shows(206)
def test_without_nccl_no_group_is_begun() -> None:
    calls: list[str] = []
    gloo: Any = SimpleNamespace(abort=lambda: calls.append("host"))
    cut_off([Link(gloo)])
    assert calls == ["host"]


@pytest.mark.shows(206)
def test_links_take_few_multiprocessors_and_go_before_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    link, group = nccl_options(timedelta(seconds=5), is_link=True), nccl_options(timedelta(seconds=5))
    assert link.is_high_priority_stream and not group.is_high_priority_stream
    assert (link.config.min_ctas, link.config.max_ctas) == (1, 4) and group.config.max_ctas is None
    assert link._timeout == group._timeout == timedelta(seconds=5)
    assert renewable.os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "torch's own thread ends no process"


def most_posted(program: schedule.Program) -> int:
    """The largest number of receives that one rank has posted and not used."""
    most, placement = 0, program.placement
    for steps in program.ranks:
        posted = 0
        for action in (action for step in steps for action in parts(step)):
            if action.op in (Op.RECV_F, Op.RECV_B):
                posted += 1
            elif action.op in (Op.F, Op.B, Op.I):
                direction = Direction.FORWARD if action.op is Op.F else Direction.BACKWARD
                posted -= Wire.of(placement, action.stage, direction).arriving is not None
            most = max(most, posted)
    return most


@pytest.mark.shows(206)
@pytest.mark.parametrize("name", BUILDERS)
def test_receives_that_are_posted_leave_two_thirds_of_a_device_to_others(name: str) -> None:
    program = schedule.lower(schedule.build(name, ranks=8, microbatches=16))
    most = most_posted(program)
    assert most >= 2 and most * nccl_options(timedelta(1), is_link=True).config.max_ctas <= NUM_SMS / 3


def rounds(lines: Sequence[Any]) -> int:
    """The rounds that ranks take which make their lines in this order, each waiting for the rank at the other end."""
    done = Counter[int]()
    for line in lines:
        done[line.source] = done[line.destination] = max(done[line.source], done[line.destination]) + 1
    return max(done.values())


@pytest.mark.shows(206)
@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize("ranks", [2, 7, 8, 64])
def test_links_are_made_in_rounds_that_do_not_grow_with_the_pipeline(name: str, ranks: int) -> None:
    lines = channels_of(schedule.build(name, ranks=ranks, microbatches=2 * ranks).placement)
    ordered = in_rounds(lines)
    assert sorted(ordered) == sorted(lines)
    of_rank = Counter(rank for line in lines for rank in (line.source, line.destination))
    # No order is better where a rank has as many; a ring of odd length has one edge more than two colours serve.
    assert rounds(ordered) <= max(of_rank.values()) + 2 * (ranks % 2)
    assert rounds(ordered) <= (4 if max(of_rank.values()) <= 4 else 8) + 2 * (ranks % 2)


@pytest.mark.shows(213)
def test_what_a_rank_sends_and_receives_at_once_is_one_operation_of_nccls() -> None:
    calls, x = list[str](), torch.empty(2, device="meta")

    def call(words: str) -> str:
        calls.append(words)
        return words

    inner = SimpleNamespace(
        _start_coalescing=lambda device: call(f"start on {device}"),
        send=lambda tensors, rank, tag: call(f"send to {rank}"),
        recv=lambda tensors, rank, tag: call(f"receive from {rank}"),
        _end_coalescing=lambda device: call("all of them"),
    )
    group: Any = SimpleNamespace(backend=FakeNCCL([]), inner=inner)
    assert RenewableGroup.exchange(group, [(x, 1), (x, 2)], [(x, 2)]) == ["all of them"]
    assert calls == ["start on meta", "send to 1", "send to 2", "receive from 2", "all of them"]

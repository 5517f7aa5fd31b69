"""`transport = "host"`: gloo carries copies of a device's tensors. The device is made up here: it is host memory too.

So the copies are ordinary ones, and it is checked that gloo gets nothing else.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Layout
from penstock.engine import EngineOptions
from penstock.parallel import grid as grid_module
from penstock.parallel import staging
from penstock.parallel.renewable import RenewableGroup
from penstock.parallel.staging import StagedTensors, StagedWork
from penstock.runtime import DistributedTransport, Header, Message
from penstock.runtime import transport as transport_module
from penstock.schedule import Channel, Direction, Placement, PlacementKind
from penstock.settings import TransportKind
from tests.dist import grid_cases, test_failing_steps
from tests.dist.launch import run_ranks

pytestmark = pytest.mark.shows(194)

CPU = torch.device("cpu")


class Copies:
    """The copies in host memory of this process; once it is made, `transport = "host"` makes them on the CPU too."""

    def __init__(self) -> None:
        #: what gloo was given
        self.given = Counter[str]()
        self._known: dict[int, weakref.ref[Tensor]] = {}
        self._is_staged = False
        grid_module.is_staged = lambda device, transport: transport == "host"
        staging.host_empty = transport_module.host_empty = self.host_empty
        for kind in (RenewableGroup, DistributedTransport):
            kind.renew = self._watched(kind.renew)
        transport_module._ChannelEnd.__init__ = self._with_checks(transport_module._ChannelEnd.__init__)

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        copy = torch.empty(shape, dtype=dtype)
        self._known[copy.data_ptr()] = weakref.ref(copy)
        return copy

    def _watched(self, renew: Callable[..., None]) -> Callable[..., None]:
        def renewed(end: Any, generation: int) -> None:
            self._is_staged = end.is_staged
            renew(end, generation)
            if end.is_staged and isinstance(end, RenewableGroup):
                end.inner = Inner(end.inner, self._checked)

        return renewed

    def _with_checks(self, make: Callable[..., None]) -> Callable[..., None]:
        def made(link: Any, *args: Any) -> None:
            make(link, *args)
            if self._is_staged:
                link.send, link.receive = self._checked("send", link.send), self._checked("receive", link.receive)

        return made

    def _checked(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def checked(*args: Any) -> Any:
            tensors = [x for x in flat(args) if isinstance(x, Tensor)]
            assert all(self._is_copy(x) for x in tensors if x.numel()), f"{name} was given a device's tensor"
            self.given[name] += len(tensors)
            return call(*args)

        return checked

    def _is_copy(self, x: Tensor) -> bool:
        known = self._known.get(x.data_ptr())
        return known is not None and known() is not None


class Inner:
    """A group inside of a renewable one, whose collectives are checked."""

    def __init__(self, group: Any, checked: Callable[[str, Callable[..., Any]], Any]) -> None:
        self._group, self._checked = group, checked

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        return found if name.startswith("_set") or name == "barrier" else self._checked(name, found)


def flat(value: Any) -> list[Any]:
    return [x for inner in value for x in flat(inner)] if isinstance(value, list | tuple) else [value]


def with_transport(module: Any, transport: TransportKind) -> None:
    """Let the engines of this module's cases be made with it."""
    module.EngineOptions = partial(EngineOptions, transport=transport)


# ---- training, scoring and generation


CASES = [
    grid_cases.Case(Layout(pp=2), 1, "1f1b"),
    grid_cases.Case(Layout(pp=2), 2, "interleaved", variant=1),
    grid_cases.Case(Layout(pp=2), 2, "zb-v"),
    grid_cases.Case(Layout(dp=2), 1, "1f1b"),
    grid_cases.Case(Layout(dp=2), 1, "1f1b", variant=1),
    grid_cases.Case(Layout(tp=2), 1, "1f1b"),
    grid_cases.Case(Layout(cp=2), 1, "1f1b"),
    grid_cases.Case(Layout(dp=2, ep=2), 1, "combined-1f1b", sparse=True),
]


def both_ways(rank: int, case: grid_cases.Case) -> tuple[list[str], Counter[str]]:
    """What differs between the ordinary transport and copies in host memory, and what these were given."""
    outcomes, copies = [], Copies()
    for transport in ("auto", "host"):
        with_transport(grid_cases, transport)
        assert not copies.given
        outcomes.append(grid_cases.run(case))
    ordinary, staged = outcomes
    names = [own.name for own in fields(ordinary) if not equal(getattr(ordinary, own.name), getattr(staged, own.name))]
    return names, copies.given


def equal(one: Any, other: Any) -> bool:
    """True if all is equal, tensors bit for bit."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(value, other[name]) for name, value in one.items())
    return one == other


@pytest.mark.parametrize("case", CASES, ids=str)
def test_copies_in_host_memory_give_the_bits_of_the_ordinary_transport(case: grid_cases.Case) -> None:
    for differing, given in run_ranks(2, both_ways, case, timeout_s=120.0):
        assert differing == []
        assert given.keys() >= {"send", "receive"} if case.layout.pp > 1 else given.total() >= 5


# ---- failing steps


FAILING = [test_failing_steps.Case(Layout(pp=2), "zb-v"), test_failing_steps.Case(Layout(dp=2), zero=True)]


def fail_staged(rank: int, case: test_failing_steps.Case) -> tuple[list[Any], bool]:
    Copies()
    with_transport(test_failing_steps, "host")
    failed = test_failing_steps.train(rank, case, True)
    with_transport(test_failing_steps, "auto")
    clean = test_failing_steps.train(rank, case, False)
    return failed["texts"], equal(failed["results"], clean["results"]) and equal(failed["state"], clean["state"])


@pytest.mark.parametrize("case", FAILING, ids=str)
def test_a_step_that_fails_is_undone_and_links_and_groups_are_made_anew(case: test_failing_steps.Case) -> None:
    for texts, same in run_ranks(2, fail_staged, case, timeout_s=120.0):
        assert len(texts) == test_failing_steps.NUM_PLACES and same


# ---- messages that come late


def late_messages(rank: int) -> tuple[bool, float]:
    """All receives are posted half a second before the first send; whoever has sent a tensor fills it anew."""
    copies = Copies()
    group = dist.group.WORLD
    assert group is not None
    transport = DistributedTransport(Placement(PlacementKind.LOOP, 2, 1), group, CPU, 20.0, is_staged=True)
    channel, shapes, start = Channel(0, 1, Direction.FORWARD), ((3,), (1 << 17,), (0, 2), (4, 5)), time.monotonic()
    if rank == 1:
        posted = [transport.receive(channel, Header.of_tensor(shape, torch.float32)) for shape in shapes]
        waited = time.monotonic() - start
        arrived = [receipt.wait().tensors[0] for receipt in posted]
        come = all(torch.equal(x, torch.full(shape, 1.0)) for x, shape in zip(arrived, shapes, strict=True))
        return come and not any(copies._is_copy(x) for x in arrived if x.numel()), waited
    time.sleep(0.5)
    for shape in shapes:
        x = torch.full(shape, 1.0)
        transport.send(channel, Message((x,)))
        x.fill_(float("nan"))
    transport.settle()
    return transport.num_pending() == 0, 0.0


def test_posted_receives_wait_for_late_sends_in_host_memory() -> None:
    (sent, _), (come, waited) = run_ranks(2, late_messages)
    assert sent and come and waited < 0.4


# ---- a collective's tensors


class Sum:
    """A collective that is over when it is waited for, or fails."""

    def __init__(self, out: Tensor, given: Tensor, fails: bool) -> None:
        self.out, self.given, self.fails = out, given, fails

    def wait(self) -> bool:
        if self.fails:
            raise RuntimeError("cut")
        self.out.add_(self.given)
        return True


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "host_empty", lambda shape, dtype: torch.zeros(shape, dtype=dtype))


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_results_of_a_collective_arrive_once_when_it_is_waited_for(in_place: bool, fails: bool) -> None:
    x, given = torch.tensor([1.0, 2.0]).requires_grad_(), torch.tensor([10.0, 20.0])
    version = x._version
    staged = StagedTensors(([[x]], "options") if in_place else (x, [given], [2]))
    written, read = flat(staged.arguments[0])[0], given if in_place else staged.arguments[1][0]
    assert staged.arguments[-1] == ("options" if in_place else [2])
    assert written.tolist() == ([1.0, 2.0] if in_place else [0.0, 0.0]) and read.tolist() == [10.0, 20.0]
    work = StagedWork(Sum(written, read, fails), staged)
    assert x.tolist() == [1.0, 2.0]
    if fails:
        with pytest.raises(RuntimeError, match="cut"):
            work.wait()
        assert x.tolist() == [1.0, 2.0]
        return
    assert work.wait()
    assert x.tolist() == ([11.0, 22.0] if in_place else [10.0, 20.0]) and x._version == version
    # Whoever has the result may change it, and ask the handle again.
    x.data.zero_()
    work.copies.arrive()
    assert x.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("device", "transport", "expected"), [("cuda", "host", True), ("cuda", "auto", False), ("cpu", "host", False)]
)
def test_only_tensors_of_another_device_are_copied_and_only_if_asked_for(
    device: str, transport: TransportKind, expected: bool
) -> None:
    assert staging.is_staged(torch.device(device), transport) is expected

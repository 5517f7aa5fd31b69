"""Cutting communicators in the orders that a quiet machine hardly ever meets: whoever waits in one is woken."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Layout, MicroBatchSpec
from penstock.parallel.collectives import Collectives
from penstock.parallel.renewable import RenewableGroup, cut_off, new_renewable_group
from penstock.runtime import DistributedTransport, Message, Recovery, StepError
from penstock.runtime import recovery as recovery_module
from penstock.runtime.transport import default_store
from penstock.schedule import Channel, Direction
from tests.dist.launch import run_ranks
from tests.dist.test_failing_steps import NUM_MICROBATCHES, Case, batch_of, break_step

LIMIT_S = 40.0
# What waits for its limit takes longer than this on any machine.
SOON_S = 10.0
# More than a connection holds on its way.
NUM_BYTES = 1 << 27


def new_group(size: int) -> RenewableGroup:
    group = new_renewable_group(range(size), "gloo", timedelta(seconds=LIMIT_S))
    assert isinstance(group, RenewableGroup)
    return group


def seconds_until_error(wait: Callable[[], object]) -> float:
    start = time.monotonic()
    with pytest.raises(RuntimeError):
        wait()
    return time.monotonic() - start


# ---- ranks that cut at the same moment


def cut_after_the_first(rank: int) -> float:
    """Rank 0 cuts just when the others, who wait for each other, have begun to."""
    group, store, receive = new_group(3), default_store(), dist.ProcessGroupGloo.recv  # pyright: ignore[reportAttributeAccessIssue]
    work = group.backend.recv([torch.empty(1)], 3 - rank, 5) if rank else None
    has_begun = False

    def begun(backend: Any, tensors: list[Tensor], peer: int, tag: int) -> dist.Work:
        nonlocal has_begun
        posted = receive(backend, tensors, peer, tag)
        if not has_begun:
            has_begun = True
            store.set(f"{rank} has begun", "")
            store.wait(["0 has cut"])
            # Until this process has seen it.
            while peer == 0:
                try:
                    receive(backend, [torch.empty(1)], 0, 7)
                except RuntimeError:
                    break
                time.sleep(0.01)
        return posted

    if rank == 0:
        store.wait(["1 has begun", "2 has begun"])
        cut_off([group])
        store.set("0 has cut", "")
    else:
        with mock.patch.object(dist.ProcessGroupGloo, "recv", begun):
            cut_off([group])
    store.set(f"{rank} is through", "")
    store.wait([f"{rank} is through" for rank in range(3)])
    return seconds_until_error(work.wait) if work else 0.0


@pytest.mark.shows(112)
def test_ranks_that_cut_while_another_does_wake_those_who_wait_for_each_other() -> None:
    assert max(run_ranks(3, cut_after_the_first)) < SOON_S


# ---- messages that are on their way when they are cut


class Peer:
    """The other of two processes, which can be stopped where it is."""

    def __init__(self, rank: int) -> None:
        default_store().set(f"process {rank}", str(os.getpid()))
        self._pid = int(default_store().get(f"process {1 - rank}"))

    def stop(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        while Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)

    def stop_in_part(self, tensor: Tensor) -> None:
        """Let it run for moments alone until the first of the bytes that it sends is there: the last is not yet."""
        self.stop()
        moment_s = 0.001
        while not tensor[0]:
            self.go_on()
            time.sleep(moment_s)
            self.stop()
            # On a busy machine it hardly runs in a short one.
            moment_s *= 1.2
        assert not tensor[-1]

    def go_on(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


def cut_soon(communicator: Any, after: str | None = None) -> None:
    """Cut it from another thread, when this one waits; and not before the store has the key `after`."""

    def act() -> None:
        if after is None:
            time.sleep(0.2)
        else:
            default_store().clone().wait([after])  # pyright: ignore[reportAttributeAccessIssue]
        cut_off([communicator])

    threading.Thread(target=act, daemon=True).start()


def broadcast(group: RenewableGroup, tensor: Tensor) -> Any:
    return Collectives(group).spread_from(tensor, owner=1)


def exchange(group: RenewableGroup, tensor: Tensor) -> Any:
    """A step round a ring, in which rank 1 alone has something to send."""
    sent, num_rows = (tensor, 0) if group.rank() else (tensor[:0], NUM_BYTES)
    return Collectives(group).send_receive(sent, 1 - group.rank(), 1 - group.rank(), num_rows)


def cut_while_sending(rank: int, launch: Callable[[RenewableGroup, Tensor], Any]) -> float:
    """Rank 0 is stopped, so that rank 1 can send but a part; returns how long that waits, and then renews the group."""
    group, peer, tensor = new_group(2), Peer(rank), torch.zeros(NUM_BYTES, dtype=torch.uint8)
    if rank == 0:
        work = launch(group, tensor)
        cut_soon(group, after="rank 1 has cut")
        time.sleep(0.2)
        default_store().set("rank 0 waits", "")
        waited = seconds_until_error(work.wait)
        group.renew(1)
    else:
        default_store().wait(["rank 0 waits"])
        peer.stop()
        work = launch(group, tensor)
        cut_soon(group)
        waited = seconds_until_error(work.wait)
        peer.go_on()
        default_store().set("rank 1 has cut", "")
        start = time.monotonic()
        group.renew(1)
        waited += time.monotonic() - start
    check_works(group)
    return waited


def cut_while_receiving(rank: int) -> float:
    """Rank 1 is stopped when a part of what it sends is there; returns how long rank 0 waits for the rest."""
    group, store, peer, waited = new_group(2), default_store(), Peer(rank), 0.0
    tensor = torch.full((NUM_BYTES,), rank, dtype=torch.uint8)
    store.set(f"{rank} sends", "")
    work = broadcast(group, tensor)
    if rank == 0:
        store.wait(["1 sends"])
        peer.stop_in_part(tensor)
        cut_soon(group)
        waited = seconds_until_error(work.wait)
        peer.go_on()
        store.set("rank 0 has cut", "")
    store.wait(["rank 0 has cut"])
    group.renew(1)
    check_works(group)
    return waited


def check_works(group: RenewableGroup) -> None:
    small = torch.full((3,), float(group.rank()))
    broadcast(group, small).wait()
    assert small.tolist() == [1.0] * 3


@pytest.mark.shows(112)
@pytest.mark.parametrize("launch", [broadcast, exchange])
def test_nobody_waits_for_a_collective_that_was_sent_in_part_and_cut(
    launch: Callable[[RenewableGroup, Tensor], Any],
) -> None:
    assert max(run_ranks(2, cut_while_sending, launch)) < SOON_S


@pytest.mark.shows(112)
def test_nobody_waits_for_a_collective_that_was_received_in_part_and_cut() -> None:
    assert max(run_ranks(2, cut_while_receiving)) < SOON_S


def cut_a_link_while_sending(rank: int) -> float:
    """Rank 1 is stopped; returns how long rank 0 waits until its message has left."""
    line, peer = Channel(0, 1, Direction.FORWARD), Peer(rank)
    transport = DistributedTransport([line], new_group(2), torch.device("cpu"), LIMIT_S)
    # One message that cannot leave as a whole, and one behind it that would be too small for a thread to wait for.
    tensors, waited = [torch.zeros(length, dtype=torch.uint8) for length in (NUM_BYTES, 8)], 0.0
    if rank == 1:
        for tensor in tensors:
            transport.receive(line, Message((tensor,)).header)
        time.sleep(0.2)
        default_store().set("rank 1 waits", "")
    else:
        default_store().wait(["rank 1 waits"])
        peer.stop()
        for tensor in tensors:
            transport.send(line, Message((tensor,)))
        cut_soon(transport)
        waited = seconds_until_error(transport.settle)
        peer.go_on()
    transport.renew(1)
    return waited


@pytest.mark.shows(112)
def test_nobody_waits_for_a_message_that_was_sent_in_part_and_cut() -> None:
    assert max(run_ranks(2, cut_a_link_while_sending)) < SOON_S


def cut_a_link_while_receiving(rank: int) -> float:
    """Rank 0 is stopped when a part of its message is there; returns how long rank 1 waits for the rest."""
    line, store, peer, waited = Channel(0, 1, Direction.FORWARD), default_store(), Peer(rank), 0.0
    transport = DistributedTransport([line], new_group(2), torch.device("cpu"), LIMIT_S)
    message = Message((torch.ones(NUM_BYTES, dtype=torch.uint8),))
    if rank == 0:
        store.wait(["rank 1 waits"])
        transport.send(line, message)
    else:
        receipt = transport.receive(line, message.header)
        [buffer] = receipt.buffers
        buffer.zero_()
        store.set("rank 1 waits", "")
        peer.stop_in_part(buffer)
        cut_soon(transport)
        waited = seconds_until_error(receipt.wait)
        peer.go_on()
        store.set("rank 1 has cut", "")
    store.wait(["rank 1 has cut"])
    transport.renew(1)
    return waited


@pytest.mark.shows(112)
def test_nobody_waits_for_a_message_that_was_received_in_part_and_cut() -> None:
    assert max(run_ranks(2, cut_a_link_while_receiving)) < SOON_S


# ---- a rank's thread that is late


def fail_with_a_late_thread(rank: int, late: str, of: int) -> list[str]:
    """One of two ranks hears of a failure, or cuts, long after the other; returns what their steps raised."""
    engine, raised = Case(Layout(pp=2)).engine(), []
    owner: Any = Recovery if late == "_hear" else recovery_module
    act = getattr(owner, late)

    def acts_late(*given: Any) -> None:
        time.sleep(2.0)
        act(*given)

    for step in range(2):
        mend = break_step(engine, 0, "before", []) if rank == 0 else lambda: None
        with mock.patch.object(owner, late, acts_late if rank == of else act), pytest.raises(StepError) as caught:
            engine.train_batch(batch_of(step, 0), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
        raised.append(str(caught.value))
        mend()
        engine.train_batch(batch_of(step, 0), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    engine.close()
    return raised


@pytest.mark.shows(112)
@pytest.mark.parametrize("of", [0, 1])
@pytest.mark.parametrize("late", ["_hear", "cut_off"])
def test_a_rank_whose_thread_is_late_ends_its_step_with_the_others(late: str, of: int) -> None:
    first, second = run_ranks(2, fail_with_a_late_thread, late, of)
    assert first == second and all("Fault: made to fail" in text for text in first)


def go_on_after_a_failure(rank: int) -> bool:
    """Rank 1 is late to go on; returns whether rank 0 went on before it."""
    engine, store = Case(Layout(pp=2)).engine(), default_store()
    transport = engine.pipeline.transport
    assert isinstance(transport, DistributedTransport)
    renew = transport.renew

    def renews_late(generation: int) -> None:
        renew(generation)
        time.sleep(1.0)
        store.set("rank 1 has renewed", "")

    if rank == 1:
        transport.renew = renews_late  # type: ignore[method-assign]
    mend = break_step(engine, 0, "before", []) if rank == 0 else lambda: None
    with pytest.raises(StepError):
        engine.train_batch(batch_of(0, 0), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    went_ahead = not store.check(["rank 1 has renewed"])
    mend()
    engine.train_batch(batch_of(0, 0), micro_batches=MicroBatchSpec(NUM_MICROBATCHES))
    engine.close()
    return went_ahead


@pytest.mark.shows(112)
def test_no_rank_goes_on_before_all_can() -> None:
    assert run_ranks(2, go_on_after_a_failure) == [False, False]

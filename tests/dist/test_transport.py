"""The transport over real processes: shapes, order, freeing, failing links, and peers that never send."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.runtime import DistributedTransport, Header, Message, TransportError
from penstock.runtime import transport as module
from penstock.schedule import Channel, Direction, Placement, PlacementKind
from tests.dist.launch import run_outcomes, run_ranks

CPU = torch.device("cpu")


def transport_of(ranks: int, stages_per_rank: int = 1, timeout_s: float = 20.0) -> DistributedTransport:
    group = dist.group.WORLD
    assert group is not None
    placement = Placement(PlacementKind.LOOP, ranks, stages_per_rank)
    return DistributedTransport(placement, group, CPU, timeout_s)


def exchange_shapes(rank: int) -> list[bool]:
    """Both ranks send ten messages of different shapes each way, all posted first; no device or host is stopped."""
    before = {*threading.enumerate()}
    transport = transport_of(2)
    there, back = Channel(0, 1, Direction.FORWARD), Channel(1, 0, Direction.BACKWARD)
    inward, outward = (there, back) if rank == 1 else (back, there)
    kinds = (torch.float32, torch.float64, torch.bool, torch.bfloat16)
    tensors = [torch.full((n + 1, 3 + n // 4 * 40_000), float(n), dtype=kinds[n % 4]) for n in range(8)]
    tensors += [torch.tensor(2.5), torch.empty(0, 3)]
    spied: list[str] = []
    for name in ("synchronize", "current_stream"):
        setattr(torch.cuda, name, lambda *a, name=name: spied.append(name))
    receipts = [transport.receive(inward, Message((x,)).header) for x in tensors]
    for x in tensors:
        transport.send(outward, Message((x.clone(),)))
    equal = [torch.equal(receipt.wait().tensors[0], x) for receipt, x in zip(receipts, tensors, strict=True)]
    transport.settle()
    assert transport.num_pending() == 0
    assert not spied
    transport.close()
    for thread in {*threading.enumerate()} - before:
        thread.join(10)
        assert not thread.is_alive(), "an engine would leave threads behind"
    return equal


@pytest.mark.shows(8)
def test_tensors_of_different_shapes_arrive_intact() -> None:
    assert run_ranks(2, exchange_shapes) == [[True] * 10] * 2


def send_and_forget(rank: int) -> bool:
    """The sender drops its tensors at once and fills memory of the same size; large ones, which do not fit a buffer."""
    transport = transport_of(2)
    channel, shape = Channel(0, 1, Direction.FORWARD), (1 << 20,)
    if rank == 0:
        for n in range(6):
            transport.send(channel, Message((torch.full(shape, float(n)),)))
            poison = torch.full(shape, float("nan"))
        assert poison.isnan().all()
        transport.settle()
        return transport.num_pending() == 0
    time.sleep(0.5)  # the sends are under way and cannot have left
    receipts = [transport.receive(channel, Header.of_tensor(shape, torch.float32)) for _ in range(6)]
    return all(bool((receipt.wait().tensors[0] == n).all()) for n, receipt in enumerate(receipts))


@pytest.mark.shows(10)
def test_a_sent_tensor_lives_until_it_has_left() -> None:
    assert run_ranks(2, send_and_forget) == [True, True]


def count_backends(rank: int, ranks: int, stages_per_rank: int) -> list[tuple[int, int, str]]:
    made: list[tuple[int, int, str]] = []
    original = module._ChannelEnd.__init__

    def init(self: Any, channel: Channel, *rest: Any) -> None:
        made.append((channel.source, channel.destination, channel.direction.name[0]))
        original(self, channel, *rest)

    setattr(module._ChannelEnd, "__init__", init)  # noqa: B010
    transport_of(ranks, stages_per_rank)
    return made


@pytest.mark.shows(13)
@pytest.mark.parametrize(("ranks", "stages_per_rank"), [(2, 1), (3, 1), (2, 2), (3, 2)])
def test_links_are_made_up_front_in_one_order_and_the_ring_wraps(ranks: int, stages_per_rank: int) -> None:
    made = run_ranks(ranks, count_backends, ranks, stages_per_rank)
    every = {(s, s + 1, "F") for s in range(ranks - 1)} | {(s + 1, s, "B") for s in range(ranks - 1)}
    if stages_per_rank > 1:
        every |= {(ranks - 1, 0, "F"), (0, ranks - 1, "B")}
    for rank, links in enumerate(made):
        assert links == sorted((link for link in every if rank in link[:2]), key=lambda k: (k[:2], k[2] == "B"))


def with_a_dead_link(rank: int) -> str:
    """Rank 1 -> rank 2 carries nothing: the test of the links names it."""
    original = module._ChannelEnd.send

    def send(self: Any, tensors: Any, header: bytes) -> None:
        if self.channel[:2] != (1, 2):
            original(self, tensors, header)

    module._ChannelEnd.send = send
    try:
        transport_of(3, timeout_s=2.0)
    except TransportError as error:
        return str(error)
    return "passed"


def test_a_failing_link_is_named_at_the_start() -> None:
    outcomes = run_outcomes(3, with_a_dead_link, timeout_s=30.0)
    assert [outcome.value for outcome in outcomes[:2]] == ["passed", "passed"]
    assert "the link test failed: no activations from rank 1 to rank 2 after" in outcomes[2].value


def reach_a_peer_that_has_ended(rank: int) -> list[str]:
    """Rank 1 ends once both have connected, and rank 0 sees that it did; each way a message is then begun anew."""
    transport, told = transport_of(2, timeout_s=5.0), []
    if rank == 1:
        dist.distributed_c10d._get_default_store().set("ended", "")
        os._exit(0)
    dist.distributed_c10d._get_default_store().wait(["ended"])
    for begin in (
        lambda: transport.send(Channel(0, 1, Direction.FORWARD), Message((torch.ones(3),))),
        lambda: transport.receive(Channel(1, 0, Direction.BACKWARD), Header.of_tensor((3,), torch.float32)).wait(),
    ):
        with pytest.raises(TransportError) as caught:
            while True:  # the first may still go on its way
                begin()
                time.sleep(0.01)
        told.append(str(caught.value))
    return told


@pytest.mark.shows(99)
def test_what_a_peer_that_has_ended_cannot_take_or_give_is_named() -> None:
    first, _ = run_outcomes(2, reach_a_peer_that_has_ended, timeout_s=30.0)
    assert first.error is None
    sending, receiving = first.value
    assert "activations from rank 0 to rank 1 can no longer be sent (" in sending
    assert "gradients from rank 1 to rank 0" in receiving


def wait_in_vain(rank: int, peer: Callable[[], None]) -> str:
    transport = transport_of(2, timeout_s=2.0)
    if rank == 1:
        peer()
        return "went"
    start = time.monotonic()
    try:
        transport.receive(Channel(1, 0, Direction.BACKWARD), Header.of_tensor((3,), torch.float32)).wait()
    except TransportError as error:
        assert time.monotonic() - start < 10.0
        return str(error)
    return "got something"


def never_sends() -> None:
    time.sleep(4.0)


@pytest.mark.shows(99)
@pytest.mark.parametrize("peer", [never_sends, dist.destroy_process_group])
def test_a_receive_that_is_never_met_ends_in_time_and_says_what_it_was(peer: Callable[[], None]) -> None:
    outcomes = run_outcomes(2, wait_in_vain, peer, timeout_s=30.0)
    assert "no gradients from rank 1 to rank 0 after" in outcomes[0].value

"""The transport over real processes: shapes, order, freeing, failing links, and peers that never send."""

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from penstock.runtime import DistributedTransport, TransportError
from penstock.runtime import transport as module
from penstock.runtime.errors import MessageMismatch
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
    messages = [torch.full((n + 1, 3 + n // 4 * 40_000), float(n), dtype=kinds[n % 4]) for n in range(8)]
    messages += [torch.tensor(2.5), torch.empty(0, 3)]
    spied: list[str] = []
    for name in ("synchronize", "current_stream"):
        setattr(torch.cuda, name, lambda *a, name=name: spied.append(name))
    receipts = [transport.receive(inward, m.shape, m.dtype) for m in messages]
    for message in messages:
        transport.send(outward, message.clone())
    equal = [torch.equal(receipt.wait(), message) for receipt, message in zip(receipts, messages, strict=True)]
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


def test_messages_of_other_sizes_have_other_tags_that_gloo_can_hold_and_announcements_do_not_have() -> None:
    sizes = (1 << 16, (1 << 16) + 1, 1 << 29, (1 << 29) + (1 << 16), (1 << 30) - 1, 1 << 30, (3 << 30) + 5)
    tags = {module._tag(torch.empty(size, dtype=torch.uint8, device="meta")) for size in sizes}
    assert len(tags) == len(sizes)
    assert all(0 < tag < 1 << 31 and tag % 2 == 1 for tag in tags)


def send_and_forget(rank: int) -> bool:
    """The sender drops its tensors at once and fills memory of the same size; large ones, which do not fit a buffer."""
    transport = transport_of(2)
    channel, shape = Channel(0, 1, Direction.FORWARD), (1 << 20,)
    if rank == 0:
        for n in range(6):
            transport.send(channel, torch.full(shape, float(n)))
            poison = torch.full(shape, float("nan"))
        assert poison.isnan().all()
        transport.settle()
        return transport.num_pending() == 0
    time.sleep(0.5)  # the sends are under way and cannot have left
    receipts = [transport.receive(channel, shape, torch.float32) for _ in range(6)]
    return all(bool((receipt.wait() == n).all()) for n, receipt in enumerate(receipts))


@pytest.mark.shows(10)
def test_a_sent_tensor_lives_until_it_has_left() -> None:
    assert run_ranks(2, send_and_forget) == [True, True]


Kind = tuple[tuple[int, int], torch.dtype]
INSIDE, APART = 3, 1 << 14
"""Widths of seven rows that travel inside their announcement, and of seven that do not."""
UNEXPECTED: list[tuple[Kind, Kind]] = [
    (((7, width), torch.float32), came)
    for width in (INSIDE, APART)
    for came in (
        ((5, width), torch.float32),
        ((9, width), torch.float32),
        ((7, width), torch.int32),
        ((7, width), torch.float64),
        ((width, 7), torch.float32),
        ((7, APART + INSIDE - width), torch.float32),
    )
]
"""Messages as they are awaited, and what comes instead."""


def take_unexpected(rank: int) -> list[str]:
    """Rank 0 sends what rank 1 does not await, and stays until that has said so; each time over links of their own."""
    channel, store, told = Channel(0, 1, Direction.FORWARD), dist.distributed_c10d._get_default_store(), []
    for number, ((shape, dtype), came) in enumerate(UNEXPECTED):
        transport = transport_of(2)
        if rank == 0:
            transport.send(channel, torch.ones(came[0], dtype=came[1]))
            store.wait([f"refused {number}"])
            continue
        with pytest.raises(MessageMismatch) as caught:
            transport.receive(channel, shape, dtype).wait()
        told.append(str(caught.value))
        store.set(f"refused {number}", "")
    return told


def test_a_message_that_is_not_the_awaited_one_is_refused() -> None:
    _, told = run_ranks(2, take_unexpected)
    what = "activations from rank 0 to rank 1"
    assert told == [
        f"{what}: expected {list(awaited[0])} of {awaited[1]}, got {list(came[0])} of {came[1]}"
        for awaited, came in UNEXPECTED
    ]


def test_a_message_of_too_many_dimensions_is_refused_where_it_is_sent() -> None:
    with pytest.raises(ValueError, match="has too many dimensions for a message; eight are always possible"):
        module._announcement(torch.zeros([1] * 50))


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

    def send(self: Any, tensor: torch.Tensor, header: bytes = b"") -> None:
        if self.channel[:2] != (1, 2):
            original(self, tensor, header)

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
        lambda: transport.send(Channel(0, 1, Direction.FORWARD), torch.ones(3)),
        lambda: transport.receive(Channel(1, 0, Direction.BACKWARD), (3,), torch.float32).wait(),
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
        transport.receive(Channel(1, 0, Direction.BACKWARD), (3,), torch.float32).wait()
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

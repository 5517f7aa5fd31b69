"""The links that a layout's ranks use, and what a byte costs on them; ranks fill the hosts of a cluster in order."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter

from penstock.planner.cluster import Cluster, Device, DeviceLink, Hosts
from penstock.settings import Layout

Ranks = Sequence[int]


@dataclass(frozen=True)
class Price:
    """The seconds of a message on the slowest of its links: its latency's, and those of each byte that a rank sends."""

    latency_s: float = 0.0
    byte_s: float = 0.0

    @classmethod
    def of(cls, link: DeviceLink, users: float) -> Price:
        """That of a link whose bandwidth is divided among so many ranks."""
        return cls(link.latency_s, users / link.bandwidth)

    @classmethod
    def slowest(cls, prices: Iterable[Price], num_messages: float = 1.0) -> Price:
        """The price of messages over all of these links, each so many times."""
        found = [*prices] or [cls()]
        return cls(num_messages * max(one.latency_s for one in found), max(one.byte_s for one in found))


@dataclass(frozen=True)
class PipelinePlace:
    """A place in the pipelines, with all ranks that hold its layers: what their passes and messages go by.

    `device` is the slowest of theirs in each respect, as copies and ranks that share layers wait for each other; a
    price is that of the slowest of their groups.
    """

    device: Device
    tensor: Price
    context: Price
    experts: Price
    #: over the copies of parameters, and of routed experts
    gradients: Price
    expert_gradients: Price


@dataclass(frozen=True)
class Wiring:
    """The places of a layout's pipelines, and the messages from each to the next, from the last to the first."""

    places: tuple[PipelinePlace, ...]
    edges: tuple[Price, ...]


@lru_cache(1024)
def wiring(cluster: Cluster, layout: Layout, folded_ep: int = 0) -> Wiring:
    """Find the links of a layout on a cluster. folded_ep: ranks that share experts, if ranks of tp are among them."""
    wires = _Wires(cluster.kinds, layout, folded_ep)
    places: dict[int, PipelinePlace] = {}
    edges: dict[tuple[int, int], Price] = {}
    firsts = layout.offsets("pp")
    steps = [
        (first % wires.period, after - first) for first, after in zip(firsts, firsts[1:] + firsts[:1], strict=True)
    ]
    for first, (place, distance) in zip(firsts, steps, strict=True):
        if place not in places:
            places[place] = wires.place(first)
        if (place, distance) not in edges:
            senders = [first + offset for offset in wires.apart("dp", "cp", "tp")] if layout.pp > 1 else []
            edges[place, distance] = wires.messages((sender, sender + distance) for sender in senders)
    return Wiring(tuple(places[place] for place, _ in steps), tuple(edges[step] for step in steps))


class _Wires:
    """The ranks of a layout on their hosts, and the prices of what they send to each other."""

    #: the hosts in order, by kind
    kinds: tuple[Hosts, ...]
    #: for each kind, its first rank and the number of its first host
    starts: list[tuple[int, int]]
    #: the distance of ranks from which on hosts come in the same way
    period: int
    layout: Layout
    folded_ep: int

    def __init__(self, kinds: tuple[Hosts, ...], layout: Layout, folded_ep: int) -> None:
        self.layout, self.folded_ep = layout, folded_ep
        self.kinds, self.starts = kinds, [(0, 0)]
        for kind in kinds[:-1]:
            rank, host = self.starts[-1]
            self.starts.append((rank + kind.num_devices, host + kind.number))
        self.period = kinds[0].devices_per_host if len(kinds) == 1 else sum(kind.num_devices for kind in kinds)

    def apart(self, *axes: str) -> list[int]:
        """The offsets of ranks along some axes, without those that fill further hosts just as others do."""
        found = [0]
        for axis in axes:
            size, stride = getattr(self.layout, axis), self.layout.stride(axis)
            enough = math.lcm(stride, self.period) // stride
            places = range(size if size % enough else enough)
            found = [offset + stride * place for offset in found for place in places]
        return found

    def host_of(self, rank: int) -> tuple[int, int, Hosts]:
        """The number of a rank's host, the rank's place on it, and its kind."""
        at = bisect_right(self.starts, rank, key=itemgetter(0)) - 1
        first, host = self.starts[at]
        number, local = divmod(rank - first, self.kinds[at].devices_per_host)
        return host + number, local, self.kinds[at]

    def place(self, first: int) -> PipelinePlace:
        """The place in the pipelines whose first rank is given."""
        layout, starts = self.layout, self.apart("tp")
        copies = layout.offsets("dp", "cp")
        holders, holder_starts, ep = copies, starts, layout.ep
        if self.folded_ep:
            holders, holder_starts, ep = layout.offsets("dp", "cp", "tp"), [0], self.folded_ep
        # Of ranks that hold experts, a run shares them, and every so many of them have the same ones.
        runs = (holders[start : start + ep] for start in range(0, len(holders), ep))
        mirrors = (holders[start::ep] for start in range(ep))
        kinds = {self.host_of(first + offset)[2]: None for offset in self.apart("dp", "cp", "tp")}
        members = layout.offsets("cp")
        ring = [
            (first + start + sender, first + start + receiver)
            for start in self.apart("dp", "tp")
            for sender, receiver in zip(members[-1:] + members, members)
            if layout.cp > 1
        ]

        def slowest(shapes: Iterable[Ranks], starts: Ranks, price: Callable[[Ranks], Price]) -> Price:
            return self._slowest(shapes, [first + start for start in starts], price)

        return PipelinePlace(
            Device.slowest([kind.device for kind in kinds]),
            tensor=slowest([layout.offsets("tp")], self.apart("dp", "cp"), self._collective),
            # Each round of the ring is a message.
            context=Price.slowest([self.messages(ring)], layout.cp - 1),
            experts=slowest(runs, holder_starts, self._exchange),
            gradients=slowest([copies], starts, self._collective),
            expert_gradients=slowest(mirrors, holder_starts, self._collective),
        )

    def _slowest(self, shapes: Iterable[Ranks], starts: Ranks, price: Callable[[Ranks], Price]) -> Price:
        """The price of the slowest group, each of the offsets of a shape from a start; those alike are priced once."""
        different: dict[tuple[int, int, int], Ranks] = {}
        size = 1
        for shape in shapes:
            if (size := len(shape)) == 1:
                return Price()
            for start in starts:
                key = (start + shape[0]) % self.period, shape[1] - shape[0], shape[-1] - shape[0]
                if key not in different:
                    different[key] = [start + offset for offset in shape]
        return Price.slowest(map(price, different.values()), math.log2(size))

    def _on_hosts(self, ranks: Ranks) -> list[tuple[int, Hosts]]:
        """The different numbers of ranks on their hosts, by kind of host. ranks: ascending."""
        found: list[tuple[int, Hosts]] = []
        for kind, (start, _) in zip(self.kinds, self.starts, strict=True):
            own = ranks[bisect_left(ranks, start) : bisect_left(ranks, start + kind.num_devices)]
            numbers = Counter((rank - start) // kind.devices_per_host for rank in own)
            found += [(number, kind) for number in sorted({*numbers.values()})]
        return found

    def _collective(self, ranks: Ranks) -> Price:
        """The price of a collective, whose ranks on a host use their network links together, as several rings do."""
        prices = []
        for number, kind in self._on_hosts(ranks):
            if number > 1:
                prices.append(Price.of(kind.host, kind.sharing(kind.host)))
            if number < len(ranks):
                prices.append(Price.of(kind.network, kind.sharing(kind.network) / number))
        return Price.slowest(prices)

    def _exchange(self, ranks: Ranks) -> Price:
        """The price of an all-to-all, of which each rank sends what goes to other hosts over the network."""
        prices, others = [], len(ranks) - 1
        for number, kind in self._on_hosts(ranks):
            if number > 1:
                prices.append(Price.of(kind.host, kind.sharing(kind.host) * (number - 1) / others))
            if number <= others:
                prices.append(Price.of(kind.network, kind.sharing(kind.network) * (len(ranks) - number) / others))
        return Price.slowest(prices, 2)

    def messages(self, pairs: Iterable[tuple[int, int]]) -> Price:
        """The price of messages that are sent at once, each from a rank to another; an adapter is shared by its own."""
        sent: Counter[tuple[DeviceLink, int, int, int]] = Counter()
        for sender, receiver in pairs:
            ends = [self.host_of(sender), self.host_of(receiver)]
            near = ends[0][0] == ends[1][0]
            for end, (host, local, kind) in enumerate(ends):
                link = kind.host if near else kind.network
                sent[link, host, local // link.shared_by, end] += 1
        return Price.slowest(Price.of(link, number) for (link, *_), number in sent.items())

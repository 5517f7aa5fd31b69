"""The links that a layout's ranks use, and what a byte costs on them; ranks fill the hosts of a cluster in order."""

from __future__ import annotations

import math
from bisect import bisect_right
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

    @property
    def devices(self) -> tuple[Device, ...]:
        return tuple(place.device for place in self.places)


@lru_cache(1024)
def wiring(cluster: Cluster, layout: Layout, folded_ep: int = 0) -> Wiring:
    """Find the links of a layout on a cluster. folded_ep: ranks that share experts, if ranks of tp are among them."""
    held = layout.groups("dp", "cp", "tp")
    found = {
        "tensor": _by_place(layout, layout.groups("tp")),
        "context": _by_place(layout, layout.groups("cp")),
        "gradients": _by_place(layout, layout.groups("dp", "cp")),
    }
    if folded_ep:
        runs = range(0, len(held[0]), folded_ep)
        found["experts"] = [[ranks[start : start + folded_ep] for start in runs] for ranks in held]
        found["expert_gradients"] = [[ranks[place::folded_ep] for place in range(folded_ep)] for ranks in held]
    else:
        found["experts"] = _by_place(layout, layout.expert_groups())
        found["expert_gradients"] = _by_place(layout, layout.expert_copies())
    wires = _Wires(cluster.kinds)
    places: dict[int, PipelinePlace] = {}
    edges: dict[tuple[int, int], Price] = {}
    for number, (ranks, after) in enumerate(zip(held, held[1:] + held[:1], strict=True)):
        if (place := wires.alike(ranks[0])) not in places:
            places[place] = wires.place(ranks, {name: groups[number] for name, groups in found.items()})
        if (edge := (place, after[0] - ranks[0])) not in edges:
            edges[edge] = wires.messages(zip(ranks, after, strict=True)) if layout.pp > 1 else Price()
    firsts = [ranks[0] for ranks in held]
    steps = zip(firsts, firsts[1:] + firsts[:1], strict=True)
    return Wiring(
        tuple(places[wires.alike(first)] for first in firsts),
        tuple(edges[wires.alike(first), after - first] for first, after in steps),
    )


def _by_place(layout: Layout, groups: Sequence[Ranks]) -> list[list[Ranks]]:
    """The groups of each place of the pipelines."""
    pipeline = layout.groups("pp")[0]
    stride = pipeline[1] if layout.pp > 1 else layout.world_size
    found: list[list[Ranks]] = [[] for _ in pipeline]
    for group in groups:
        found[group[0] // stride % layout.pp].append(group)
    return found


class _Wires:
    """Ranks on their hosts, and the prices of what they send to each other."""

    #: the hosts in order, by kind
    kinds: tuple[Hosts, ...]
    #: for each kind, its first rank and the number of its first host
    starts: list[tuple[int, int]]

    def __init__(self, kinds: tuple[Hosts, ...]) -> None:
        self.kinds, self.starts = kinds, [(0, 0)]
        for kind in kinds[:-1]:
            rank, host = self.starts[-1]
            self.starts.append((rank + kind.num_devices, host + kind.number))

    def alike(self, rank: int) -> int:
        """A number that ranks have in common from which on hosts come in the same way."""
        return rank % self.kinds[0].devices_per_host if len(self.kinds) == 1 else rank

    def host_of(self, rank: int) -> tuple[int, int, Hosts]:
        """The number of a rank's host, the rank's place on it, and its kind."""
        at = bisect_right(self.starts, rank, key=itemgetter(0)) - 1
        first, host = self.starts[at]
        number, local = divmod(rank - first, self.kinds[at].devices_per_host)
        return host + number, local, self.kinds[at]

    def place(self, ranks: Ranks, groups: dict[str, list[Ranks]]) -> PipelinePlace:
        """The place that so many ranks hold, given its groups by the names of their prices."""
        kinds = self.kinds if len(self.kinds) == 1 else {self.host_of(rank)[2] for rank in ranks}
        prices = {
            name: self._slowest(own, self._exchange if name == "experts" else self._collective)
            for name, own in groups.items()
            if name != "context"
        }
        ring = [(group[i - 1], rank) for group in groups["context"] for i, rank in enumerate(group) if len(group) > 1]
        # Each round of the ring is a message.
        num_rounds = len(groups["context"][0]) - 1
        context = Price.slowest([self.messages(ring)], num_rounds)
        return PipelinePlace(Device.slowest([kind.device for kind in kinds]), context=context, **prices)

    def _slowest(self, groups: list[Ranks], price: Callable[[Ranks], Price]) -> Price:
        """The price of the slowest group; those that lie alike on their hosts are priced once."""
        size = len(groups[0])
        if size == 1:
            return Price()
        different = {(self.alike(own[0]), own[1] - own[0], own[-1] - own[0]): own for own in groups}
        return Price.slowest(map(price, different.values()), math.log2(size))

    def _on_hosts(self, ranks: Ranks) -> list[tuple[int, Hosts]]:
        """The number of ranks on each of their hosts, with its kind."""
        on_host: dict[int, tuple[int, Hosts]] = {}
        for rank in ranks:
            host, _, kind = self.host_of(rank)
            on_host[host] = on_host.get(host, (0, kind))[0] + 1, kind
        return [*on_host.values()]

    def _collective(self, ranks: Ranks) -> Price:
        """The price of a collective, whose ranks on a host use their network links together, as several rings do."""
        on_hosts = self._on_hosts(ranks)
        near = [Price.of(kind.host, kind.sharing(kind.host)) for number, kind in on_hosts if number > 1]
        if len(on_hosts) == 1:
            return near[0]
        return Price.slowest(
            [*near, *(Price.of(kind.network, kind.sharing(kind.network) / number) for number, kind in on_hosts)]
        )

    def _exchange(self, ranks: Ranks) -> Price:
        """The price of an all-to-all, of which each rank sends what goes to other hosts over the network."""
        on_hosts, others = self._on_hosts(ranks), len(ranks) - 1
        prices = []
        for number, kind in on_hosts:
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

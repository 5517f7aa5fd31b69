"""Messages are priced by the links that their ranks use, whatever the layout's order and the hosts' sizes."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.cluster import Cluster, DeviceLink, Hosts
from penstock.planner.estimate import Candidate, Workload, estimate
from penstock.planner.links import wiring
from penstock.planner.shape import ModelShape
from penstock.planner.times import Constants
from penstock.settings import Layout

SHAPE = ModelShape("*E" * 4, 256, 512, 8, 8, 32, expert_size=128, num_experts=8, num_active=2)
ONE = Cluster.named("h100")
SIZES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (4, 2), (1, 3)]


@st.composite
def layouts_on_hosts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...], str]:
    """A layout in any order on hosts of any sizes, and a schedule."""
    order = "-".join(draw(st.permutations(("dp", "pp", "cp", "tp"))))
    (pp, dp), (cp, tp) = draw(st.sampled_from(SIZES)), draw(st.sampled_from(SIZES[:-1]))
    ep = draw(st.sampled_from([size for size in (1, 2, 4) if dp * cp % size == 0]))
    layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=ep, order=order)
    hosts: list[int] = []
    while left := layout.world_size - sum(hosts):
        hosts.append(draw(st.integers(1, left)))
    return layout, tuple(hosts), draw(st.sampled_from(["1f1b", "interleaved", "zb-v"] if pp > 1 else ["1f1b"]))


def cluster_of(hosts: tuple[int, ...], slow: tuple[int, str] | None = None) -> Cluster:
    """Hosts of so many devices each; `slow` is a host's number and which of its links is slow."""
    kinds = []
    for number, size in enumerate(hosts):
        own = replace(ONE.kinds[0], devices_per_host=size)
        if slow is not None and slow[0] == number:
            own = replace(own, **{slow[1]: replace(getattr(own, slow[1]), bandwidth=1e3)})
        kinds.append(own)
    return replace(ONE, kinds=tuple(kinds))


def talking(layout: Layout, schedule: str) -> Iterator[tuple[int, int]]:
    """Yield the pairs of ranks that send to each other, by the definition of each kind of message."""
    for axes in (("tp",), ("dp", "cp")):
        for group in layout.groups(*axes):
            yield from itertools.combinations(group, 2)
    for group in (*layout.expert_groups(), *layout.expert_copies()):
        yield from itertools.combinations(group, 2)
    for group in layout.groups("cp"):
        yield from zip(group, group[1:] + group[:1], strict=True)
    for group in layout.groups("pp"):
        yield from itertools.pairwise(group)
        if schedule == "interleaved":
            yield group[-1], group[0]


@pytest.mark.shows(171)
@settings(max_examples=30, deadline=None, derandomize=True)
@given(layouts_on_hosts())
def test_a_slower_link_slows_the_layouts_that_use_it_and_no_other(case: tuple[Layout, tuple[int, ...], str]):
    layout, hosts, name = case
    host_of = [number for number, size in enumerate(hosts) for _ in range(size)]
    used = {
        (host_of[rank], "host" if host_of[one] == host_of[other] else "network")
        for one, other in talking(layout, name)
        if one != other
        for rank in (one, other)
    }
    workload = Workload(SHAPE, 64 * layout.cp, 8 * layout.dp)
    candidate = Candidate(layout, name, 1 if name == "1f1b" else 2, 1, 8)

    def step_s(slow: tuple[int, str] | None) -> float:
        return estimate(workload, candidate, cluster_of(hosts, slow), Constants()).step_s

    before = step_s(None)
    for link in itertools.product(range(len(hosts)), ("host", "network")):
        assert (step_s(link) > 1.01 * before) == (link in used), link
        assert link in used or step_s(link) == before, link


def test_hosts_that_are_filled_alike_cost_what_each_of_them_costs():
    """A layout repeats itself from host to host, of which only as many are looked at as differ."""
    orders = ("pp-dp-cp-tp", "dp-pp-cp-tp", "cp-pp-tp-dp")
    for pp, dp, cp, tp, order in itertools.product((1, 2, 4), (1, 4), (2, 3), (1, 3), orders):
        layout = Layout(pp=pp, dp=dp, cp=cp, tp=tp, ep=cp, order=order)
        for per_host in (size for size in (2, 4, 8) if layout.world_size % size == 0):
            network = replace(ONE.kinds[0].network, shared_by=8)
            kind = Hosts(layout.world_size // per_host, per_host, ONE.kinds[0].device, ONE.kinds[0].host, network)
            alike = replace(ONE, kinds=(kind,))
            apart = replace(alike, kinds=(replace(alike.kinds[0], number=1),) * alike.num_hosts)
            for folded_ep in (0, cp * tp):
                assert wiring(alike, layout, folded_ep) == wiring(apart, layout, folded_ep)


@pytest.mark.shows(171)
def test_a_pipeline_over_hosts_takes_at_least_what_its_slowest_edge_needs():
    workload, hosts = Workload(SHAPE, 1024, 16), Cluster.named("h100", 16)
    message = 2 * 1024 * SHAPE.hidden_size
    for name, stages in (("1f1b", 1), ("afab", 1), ("looped-bfs", 2)):
        pipeline = Candidate(Layout(pp=4, tp=1, dp=4, order="dp-pp-cp-tp"), name, stages, 1, 4)
        within = estimate(workload, pipeline, hosts, Constants()).step_s
        over = replace(pipeline, layout=replace(pipeline.layout, order="pp-dp-cp-tp"))
        for bandwidth in (1e9, 1e6):
            (kind,) = hosts.kinds
            slower = replace(kind, network=replace(kind.network, bandwidth=bandwidth))
            found = estimate(workload, over, replace(hosts, kinds=(slower,)), Constants()).step_s
            # Of each microbatch, every edge carries as many activations as a rank has stages, and a gradient of each.
            least_s = 4 * stages * message / (Constants().links * bandwidth)
            assert found >= least_s
            if bandwidth == 1e6:
                assert found < 4 * least_s + within


@pytest.mark.shows(171)
def test_ranks_that_send_at_once_share_their_adapter_and_a_lone_one_has_it():
    shared = replace(ONE, kinds=(replace(ONE.kinds[0], number=2, network=DeviceLink(8e9, 0.0, shared_by=8)),))

    def prices(layout: Layout) -> list[float]:
        return [edge.byte_s * 8e9 for edge in wiring(shared, layout).edges]

    # Each of the eight ranks of a host sends to the other host.
    assert prices(Layout(pp=2, tp=8)) == [pytest.approx(8)] * 2
    assert prices(Layout(pp=2, dp=4, tp=2, order="pp-dp-cp-tp")) == [pytest.approx(8)] * 2
    # Of a pipeline that fills hosts, one rank does, and of one of pairs two.
    lone = prices(Layout(pp=16))
    assert [place for place, price in enumerate(lone) if price > 0.1] == [7, 15]
    assert lone[7] == lone[15] == pytest.approx(1)
    assert prices(Layout(pp=8, tp=2))[3] == pytest.approx(2)
    # Two pipelines side by side cross at the same edges; their gradients go within the host.
    assert prices(Layout(pp=8, dp=2, order="pp-dp-cp-tp"))[3] == pytest.approx(2)
    two = wiring(shared, Layout(pp=8, dp=2, order="pp-dp-cp-tp")).places[0]
    assert two.gradients.byte_s == pytest.approx(1 / shared.kinds[0].host.bandwidth)
    # Gradients go round the ranks of both axes, of which each host here has two, with an adapter each.
    pairs = replace(ONE, kinds=(replace(ONE.kinds[0], number=2, devices_per_host=2),))
    both = wiring(pairs, Layout(dp=2, cp=2)).places[0]
    assert both.gradients.byte_s == pytest.approx(1 / (2 * pairs.kinds[0].network.bandwidth))
    # The members of a ring on a host use its adapter together; in a ring of messages, one of them sends out.
    rings = wiring(shared, Layout(dp=16)).places[0], wiring(shared, Layout(cp=16)).places[0]
    assert rings[0].gradients.byte_s * 8e9 == pytest.approx(1) == rings[1].context.byte_s * 8e9


def test_an_exchange_takes_the_network_for_what_leaves_the_host():
    cluster = Cluster.named("h100", 16)
    experts = wiring(cluster, Layout(dp=16, ep=16)).places[0].experts
    assert experts.byte_s == pytest.approx(8 / 15 / cluster.kinds[0].network.bandwidth)
    assert experts.latency_s == pytest.approx(2 * math.log2(16) * cluster.kinds[0].network.latency_s)
    near = wiring(cluster, Layout(dp=16, ep=8)).places[0].experts
    assert near.byte_s == pytest.approx(1 / cluster.kinds[0].host.bandwidth)

"""Small models and prompts for the tests of generation, and every rank of a ring in this thread."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from penstock.engine.answers import Drawing, Leading, Listeners, Request, answers
from penstock.engine.generate import GenerateOptions
from penstock.engine.generated import Generated
from penstock.model import CacheSize, ModelConfig, SamplingParams, decoder_units
from penstock.runtime import (
    Boundary,
    InProcessHub,
    InProcessTransport,
    Journey,
    Recorder,
    Ring,
    RingReport,
    Stage,
    travel_together,
)
from penstock.schedule import Conductor, Placement, PlacementKind, partition

# Widths are multiples of the vectors' length, so that a row's bits do not depend on how many others there are.
CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, max_length=96
)
LENGTHS = (7, 1, 19, 19, 4, 2)


def random_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 2) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist() for length in lengths]


@cache
def random_weights(config: ModelConfig = CONFIG) -> dict[str, Tensor]:
    """Weights by full name, large enough for answers that differ."""
    generator = torch.Generator().manual_seed(1)
    weights = {}
    for unit in decoder_units(config):
        for name, parameter in unit.build().named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            weights[unit.full_name(name)] = 0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0)
    return weights


def load(parameters: dict[str, nn.Parameter], weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(weights[name.removesuffix("@2")])


@dataclass(frozen=True)
class Together:
    """What came of all ranks in one thread: the answers, each rank's report, and messages, sent and never taken."""

    answers: tuple[Generated, ...]
    reports: list[RingReport]
    num_messages: int
    num_pending: int


@cache
def ring_stages(placement: Placement, config: ModelConfig = CONFIG) -> dict[int, Stage]:
    """The stages of the first route, cut as evenly as units allow."""
    units, weights = decoder_units(config), random_weights(config)
    stages = {}
    for number, own in enumerate(partition([1.0] * len(units), placement.stages_per_route)):
        modules = [(units[i].name, units[i].build()) for i in own]
        stages[number] = Stage(number, modules, Boundary(config.hidden_size, torch.float32))
        load(dict(stages[number].named_parameters()), weights)
    return stages


def generate_together(
    num_ranks: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    options: GenerateOptions | None = None,
    kind: PlacementKind = PlacementKind.LOOP,
    stages_per_rank: int = 1,
) -> Together:
    """Generate with every rank of a ring in this thread."""
    placement, options = Placement(kind, num_ranks, stages_per_rank), options or GenerateOptions()
    own = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    requests = Request.all_of(prompts, own)
    shape = options.shape(len(requests), num_ranks)
    longest = max((len(p) + q.max_new_tokens for p, q in zip(prompts, own, strict=True)), default=1)
    size = CacheSize(shape.num_rows, longest, torch.float32, torch.device("cpu"))
    hubs, stages = (InProcessHub(), InProcessHub()), ring_stages(placement)
    wishes = [request.wish(prompts) for request in requests]
    conductor = Conductor(wishes, shape, options.refill, options.longest_first)
    lead, drawing = Leading(prompts, requests, conductor, Listeners()), Drawing(prompts, requests)
    rings, journeys = [], []
    for rank in range(num_ranks):
        local = {n: stage for n, stage in stages.items() if placement.rank_of(n) == rank}
        transport, host = (InProcessTransport(hub, rank) for hub in hubs)
        ring = Ring(placement, local, transport, host, Recorder(rank))
        caches = {number: stage.new_caches(size) for number, stage in local.items()}
        draw = drawing.draw if ring.drawer == rank else None
        journeys.append(Journey(shape, caches, draw, lead.lead if rank == 0 else None))
        rings.append(ring)
    reports = travel_together(rings, journeys)
    found = answers(requests, lead.told(), drawing.told())
    pending = sum(ring.transport.num_pending() + ring.host.num_pending() for ring in rings)
    return Together(found, reports, sum(hub.num_messages for hub in hubs), pending)

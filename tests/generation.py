"""Small models and prompts for the tests of generation, and every rank of a ring in a thread of its own."""

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from penstock import schedule
from penstock.engine.generation.options import GenerateOptions
from penstock.model import CacheSize, decoder_units
from penstock.model.devices import use_kernels_of
from penstock.runtime import (
    Boundary,
    DecodeLoop,
    Generation,
    Recorder,
    Ring,
    Stage,
    StageDecoder,
    TransportError,
)
from penstock.runtime.message import Header, Message
from penstock.runtime.transport import Line
from penstock.schedule import Placement, PlacementKind, Scheduler, partition
from penstock.settings import ModelConfig, SamplingParams

# Widths are multiples of the vectors' length, so that a row's bits do not depend on how many others there are.
CONFIG = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=64, num_layers=3, num_heads=4, num_kv_heads=2, max_length=96
)
LENGTHS = (7, 1, 19, 19, 4, 2)


def random_prompts(lengths: Sequence[int] = LENGTHS, seed: int = 2) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(CONFIG.vocabulary, (length,), generator=generator).tolist() for length in lengths]


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
    """What came of all ranks: the answers, each rank's loop, and messages, sent and never taken."""

    answers: Sequence[schedule.Sequence]
    loops: list[DecodeLoop]
    num_messages: int
    num_pending: int


@dataclass(eq=False)
class Lines:
    """The queues that join the transports of ranks in threads; every line has one sender and one receiver."""

    queues: dict[Line, "queue.SimpleQueue[Message]"] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)
    num_messages: int = 0

    def queue(self, line: Line) -> "queue.SimpleQueue[Message]":
        with self.lock:
            return self.queues.setdefault(line, queue.SimpleQueue())


class ThreadTransport:
    """The transport of a rank in a thread: a send appends to the line's queue, and a receipt blocks."""

    def __init__(self, lines: Lines, rank: int) -> None:
        self.lines, self.rank = lines, rank
        self.posted: dict[Line, deque[ThreadReceipt]] = {}

    def receive(self, channel: Line, header: Header | None) -> "ThreadReceipt":
        assert header is not None, "a ring sends tensors"
        receipt = ThreadReceipt(self, channel, header)
        self.posted.setdefault(channel, deque()).append(receipt)
        return receipt

    def send(self, channel: Line, message: Message) -> None:
        self.lines.queue(channel).put(message)
        with self.lines.lock:
            self.lines.num_messages += 1

    def num_pending(self) -> int:
        sent = (queue.qsize() for line, queue in self.lines.queues.items() if line.source == self.rank)
        return sum(map(len, self.posted.values())) + sum(sent)

    def settle(self) -> None:
        """A queued message has left its sender."""

    def abandon(self) -> None:
        """Other ranks stop waiting after a while."""

    def close(self) -> None:
        """There is no helper thread."""


@dataclass(frozen=True, eq=False)
class ThreadReceipt:
    transport: ThreadTransport
    line: Line
    header: Header

    def ready(self) -> bool:
        return True

    def wait(self) -> Message:
        assert self.transport.posted[self.line][0] is self, f"{self.line}: messages are awaited in another order"
        try:
            message = self.transport.lines.queue(self.line).get(timeout=540)
        except queue.Empty:
            raise TransportError(f"{self.line}: no message came") from None
        self.transport.posted[self.line].popleft()
        assert message.header == self.header, self.line
        return message


@cache
def ring_stages(placement: Placement, config: ModelConfig = CONFIG) -> dict[int, Stage]:
    """The stages of the first route, cut as evenly as units allow."""
    units, weights = decoder_units(config), random_weights(config)
    stages = {}
    for number, own in enumerate(partition([1.0] * len(units), placement.stages_per_route)):
        modules = [(units[i].name, units[i].build()) for i in own]
        stages[number] = Stage(number, modules, Boundary(config.hidden_size, torch.float32))
        load(dict(stages[number].named_parameters()), weights)
        for _, module in modules:
            use_kernels_of(torch.device("cpu"), module)
    return stages


def generate_together(
    num_ranks: int,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    options: GenerateOptions | None = None,
    kind: PlacementKind = PlacementKind.LOOP,
    stages_per_rank: int = 1,
    late: int = 0,
) -> Together:
    """Generate with every rank of a ring in a thread of its own. late: see `Scheduler`."""
    placement, options = Placement(kind, num_ranks, stages_per_rank), options or GenerateOptions()
    own = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    sequences = schedule.Sequence.all_of(prompts, own)
    shape = options.shape(len(sequences), num_ranks)
    longest = max((len(p) + q.max_new_tokens for p, q in zip(prompts, own, strict=True)), default=1)
    size = CacheSize(shape.num_rows, longest, torch.float32, torch.device("cpu"))
    activations, host, stages = Lines(), Lines(), ring_stages(placement)
    scheduler = Scheduler(sequences, shape, options.refill, options.longest_first, late=late)
    loops = []
    for rank in range(num_ranks):
        local = [stage for number, stage in stages.items() if placement.rank_of(number) == rank]
        ring = Ring(
            placement, ThreadTransport(activations, rank), ThreadTransport(host, rank), Recorder(rank), size.device
        )
        # The ranks would have sequences of their own, and here share those of the first.
        decoders = [StageDecoder(stage, stage.new_caches(size)) for stage in local]
        loops.append(DecodeLoop(ring, decoders, Generation(sequences, shape, scheduler if rank == 0 else None)))
    run_together(loops)
    loops[placement.output_rank].share_answers(None)
    pending = sum(loop.ring.transport.num_pending() + loop.ring.host.num_pending() for loop in loops)
    num_messages = activations.num_messages + host.num_messages
    return Together(sequences, loops, num_messages, pending)


def run_together(loops: Sequence[DecodeLoop]) -> None:
    """Run all ranks of a ring, and raise what the first of them failed with."""
    errors: list[BaseException] = []

    def run(loop: DecodeLoop) -> None:
        try:
            loop.run()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(loop,), daemon=True) for loop in loops[1:]]
    for thread in threads:
        thread.start()
    run(loops[0])
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]

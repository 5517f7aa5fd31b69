"""Generation on one rank: batches go through its stages until every sequence has ended.

If one rank holds the whole model and one slot all sequences, generation is a plain loop: schedule, compute, update.
In a ring of ranks or slots the rank of the first stage runs `DecodeLoop.lead`: the same three calls, but a batch's
tokens are awaited only when its slot's next turn comes, while other slots' batches are under way. The other ranks learn
the batches from headers (`penstock.runtime.decode.relay`).

Every rank computes the batches of a round in order, stage by stage. So the messages of each channel arrive in the order
in which they are awaited, and nothing else is ever sent.

Shapes: T tokens of a batch, S sampled ones, D hidden size, V vocabulary.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import schedule
from penstock.model import CachedRows, Draw
from penstock.model.sampling import JointDraw, draw_jointly, joint_draws, numbers_per_token, unpacked
from penstock.parallel.host import broadcast_value
from penstock.parallel.staging import begin_read, in_one_copy
from penstock.runtime.decode.relay import HeaderRelay, Ring
from penstock.runtime.errors import TransportError
from penstock.runtime.message import Message
from penstock.runtime.stage import Stage
from penstock.runtime.trace import Awaited
from penstock.runtime.transport import Receipt
from penstock.schedule import Action, Batch, Direction, Ending, Op, RingShape, Scheduler, Token
from penstock.schedule.rules import Wire


@dataclass(eq=False)
class Generation:
    """The state of one generation on a rank, from its first batch to its last; interruptions may lie between.

    The functions are called on the rank of the first stage; on several ranks a thread calls them.

    listen: called with the sequences that have a new token. admit: called before each batch to add sequences to the
    scheduler and stop some; returns True if more may come, and waits for them if nothing is left to compute.
    interrupts: called between two rounds; once it returns true, the loop ends with unfinished sequences, with which
    another loop can go on.
    """

    #: the sequences known from the beginning, by number; the same on all ranks of the ring
    sequences: Sequence[schedule.Sequence]
    #: slots, and rows of each
    shape: RingShape
    #: decides every batch, on the rank of the first stage; None on the others
    scheduler: Scheduler | None = None
    listen: Callable[[list[schedule.Sequence]], None] | None = None
    admit: Callable[[Scheduler], bool] | None = None
    interrupts: Callable[[], object] | None = None
    #: sequence -> for each token the mask of those that could not be drawn; on the rank of the last stage, on request
    filter_masks: list[list[Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.filter_masks = [[] for _ in self.sequences]


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """A batch on one rank: with the sequences of its items, and all that its device needs to know of it."""

    batch: Batch
    sequences: list[schedule.Sequence]
    rows: CachedRows
    #: [T] int64, on the rank of the first stage
    token_ids: Tensor | None
    #: the tokens to be drawn, on the rank of the last stage: one by one, and by recipe
    draws: Sequence[Draw]
    joint_draws: Sequence[JointDraw]

    @cached_property
    def sampled(self) -> list[schedule.Sequence]:
        """The sequences that get a token, in order."""
        return [sequence for item, sequence in zip(self.batch.items, self.sequences, strict=True) if item.sampled]


@dataclass(eq=False)
class StageDecoder:
    """A stage with the KV caches of its units; decodes the live rows of a batch."""

    #: the local stage, whose units can read chunk by chunk
    stage: Stage
    #: its units' KV caches
    caches: Sequence[Any]

    def decode(self, x: Tensor, rows: CachedRows, slot: range) -> Tensor:
        """The stage's output for a batch; `slot` are its slot's rows of the cache."""
        return self.stage.decode(x, self.caches, rows)


@dataclass(eq=False)
class DecodeLoop:
    """One rank's part in one generation."""

    #: links to the other ranks
    ring: Ring
    #: local stages with their KV caches, in order
    decoders: Sequence[StageDecoder]
    #: sequences and slots, and on the rank of the first stage scheduler and listeners
    generation: Generation
    #: number -> sequence, from the batch of its arrival to the one after its end
    live_sequences: dict[int, schedule.Sequence] = field(init=False)
    #: passes headers and tokens on
    relay: HeaderRelay = field(init=False)
    #: local stage -> source of its input and target of its output
    _wires: dict[int, Wire] = field(init=False)
    #: rounds so far, and seconds from the first header to the last
    num_rounds: int = field(default=0, init=False)
    wall_s: float = field(default=0.0, init=False)
    #: this rank's forwards so far, their tokens, and the seconds that they took
    num_forwards: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)
    busy_s: float = field(default=0.0, init=False)
    #: computes the batch whose input is awaited
    _prepared: Callable[[], Callable[[], Tensor] | None] | None = field(default=None, init=False)
    #: on the rank of the last stage, the tokens [S] drawn last, on the device, and the sequences that they belong to
    _last: tuple[Tensor, list[schedule.Sequence]] = field(init=False)
    #: the rows of each slot
    _slots: list[range] = field(init=False)
    #: True if a local stage is the model's first, and its last
    _holds_first: bool = field(init=False)
    _holds_last: bool = field(init=False)
    #: (stage, slot) -> its output for this rank's next stage
    _outputs: dict[tuple[int, int], Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        shape, placement = self.generation.shape, self.ring.placement
        self.live_sequences = {sequence.number: sequence for sequence in self.generation.sequences}
        self.relay = HeaderRelay(self.ring, shape.rows_per_slot)
        local = [decoder.stage.index for decoder in self.decoders]
        self._wires = {stage: Wire.of(placement, stage, Direction.FORWARD) for stage in local}
        self._slots = [shape.rows_of(slot) for slot in range(shape.num_slots)]
        self._holds_first, self._holds_last = (
            any(map(is_end, local)) for is_end in (placement.is_first, placement.is_last)
        )

    def run(self) -> None:
        """Take part until all sequences have ended, or the generation is interrupted. Blocks in the transport.

        Raises: TransportError if a message was not sent or did not arrive in time.
        """
        ring, finished = self.ring, False
        try:
            with torch.inference_mode():
                start = time.perf_counter()
                if self.generation.scheduler is not None and ring.is_one_rank and len(self._slots) == 1:
                    self.repeat(self.generation.scheduler)
                else:
                    self._go_round()
                self.wall_s = time.perf_counter() - start
            ring.transport.settle()
            ring.host.settle()
            finished = True
        except TransportError as error:
            raise type(error)(f"{ring.recorder.where()}: {error}") from error
        except Exception as error:
            error.add_note(ring.recorder.where())
            raise
        finally:
            if not finished:
                self.relay.cancel()
                ring.transport.abandon()
                ring.host.abandon()

    def share_answers(self, group: dist.ProcessGroup | None) -> None:
        """Give all ranks of the pipeline the answers, which the first rank has and, with filter masks, the last.

        All ranks call it after `run`; `group` carries host memory (None: there is one rank).
        """
        sequences = self.generation.sequences
        if group is not None:
            answers = [[s.ending and s.ending.value, list(map(list, s.generated))] for s in sequences]
            for sequence, (ending, tokens) in zip(sequences, broadcast_value(answers, 0, group), strict=True):
                sequence.ending, sequence.generated = ending and Ending(ending), [Token(*token) for token in tokens]
        if any(sequence.params.filter_mask for sequence in sequences):
            none = torch.empty(0, 0, dtype=torch.bool)
            # Without those of tokens that were drawn behind an end token.
            stacked = [
                torch.stack(masks[: sequence.num_tokens]) if masks else none
                for sequence, masks in zip(sequences, self.generation.filter_masks, strict=True)
            ]
            masks = broadcast_value(stacked, self.ring.last_rank, group)
            for sequence, mask in zip(sequences, masks, strict=True):
                sequence.filter_mask = mask if sequence.params.filter_mask else None

    def _localise(self, batch: Batch) -> LocalBatch:
        """Apply a batch's arrivals and departures, and build its index tensors; batch by batch in order."""
        for sequence in batch.arrived:
            self.live_sequences[sequence.number] = sequence
        for number in batch.ended:
            del self.live_sequences[number]
        sequences = [self.live_sequences[item.sequence] for item in batch.items]
        rows, ids, draws = CachedRows.of(batch.items), list[int](), list[Draw]()
        unread: dict[int, int] = {}
        for item, sequence in zip(batch.items, sequences, strict=True):
            if self._holds_first:
                ids += sequence.token_ids[item.start : item.end]
                if len(sequence.token_ids) < item.end:
                    unread[sequence.number] = len(ids)
                    ids.append(0)
            if self._holds_last and item.sampled:
                prompt, position = sequence.prompt_tokens, item.end - len(sequence.prompt_tokens)
                draws.append(Draw(sequence.params, sequence.identity, position, prompt, sequence.drawn))
        joint = joint_draws(draws)
        names = ("positions", "rows_T", "sampled_S", "items_3I")
        places = {name: getattr(rows, name) for name in names}
        entering = {"ids": torch.tensor(ids, dtype=torch.int64)} if ids else {}
        if unread:
            # The host has not read these tokens yet.
            tokens_from = [(unread[s.number], place) for place, s in enumerate(self._last[1]) if s.number in unread]
            entering["unread"] = torch.tensor(tokens_from).T
        places, entering, *numbers = in_one_copy(
            [places, entering, *(draw.numbers for draw in joint)], self.ring.device
        )
        joint = [replace(draw, numbers=arrived) for draw, arrived in zip(joint, numbers, strict=True)]
        if unread:
            to, source = entering["unread"]
            entering["ids"].index_copy_(0, to, self._last[0].index_select(0, source))
        return LocalBatch(batch, sequences, replace(rows, **places), entering.get("ids"), draws, joint)

    # ---- one rank, one slot

    def repeat(self, scheduler: Scheduler) -> None:
        """Schedule, compute and update, batch by batch, on a rank that has the whole model and one slot.

        A batch's tokens are read when the scheduler's `late` batches behind it have been launched.
        """
        admit, interrupts = self.generation.admit, self.generation.interrupts
        in_flight = deque[tuple[Batch, Callable[[], list[Token]]]]()
        while interrupts is None or not interrupts():
            goes_on = admit is not None and admit(scheduler)
            if (batch := scheduler.schedule()) is not None:
                in_flight.append((batch, self._whole_model(batch)))
            elif not in_flight and not goes_on:
                return
            while len(in_flight) > (scheduler.late if batch is not None else 0):
                self._update(scheduler, *in_flight.popleft())
        for entry in in_flight:
            self._update(scheduler, *entry)

    def _whole_model(self, batch: Batch) -> Callable[[], list[Token]]:
        """Compute a batch on a rank that has the whole model; returns what waits for its tokens."""
        read, local = None, self._localise(batch)
        if batch.items or self.ring.lockstep:
            for decoder in self.decoders:
                read = self._compute(decoder, local)
        self.num_rounds += 1
        params = [sequence.params for sequence in local.sampled]
        return lambda: [] if read is None else unpacked(read(), params)

    def _update(self, scheduler: Scheduler, batch: Batch, wait_for_tokens: Callable[[], list[Token]]) -> None:
        grown = scheduler.update(batch, wait_for_tokens())
        if self.generation.listen is not None:
            self.generation.listen(grown)

    # ---- a ring of slots

    def lead(self, scheduler: Scheduler) -> Iterator[Batch]:
        """Schedule batch after batch, on the rank of the first stage; each is computed by all ranks in turn."""
        admit, interrupts = self.generation.admit, self.generation.interrupts
        in_flight: dict[int, tuple[Batch, Callable[[], list[Token]]]] = {}
        while not (scheduler.is_between_rounds and interrupts is not None and interrupts()):
            slot = scheduler.next_slot()
            if slot in in_flight:
                self._update(scheduler, *in_flight.pop(slot))
            # Requests may have come while no slot had work.
            if not (admit is not None and admit(scheduler)) and slot is None and scheduler.is_idle:
                break
            # Without work an empty batch shows the other ranks that this one is alive.
            batch = scheduler.schedule() or Batch(0, ())
            if batch.items:
                # Posted before anything is sent, so that the receive waits for the tokens.
                in_flight[batch.slot] = batch, self.relay.post_tokens(scheduler.sampled(batch))
            self.relay.announce(batch)
            yield batch
        for batch, wait_for_tokens in in_flight.values():
            self._update(scheduler, batch, wait_for_tokens)
        self.relay.announce(None)

    def _go_round(self) -> None:
        """Compute the batches of each round, stage by stage."""
        first, *others = self.decoders
        scheduler = self.generation.scheduler
        # In lockstep the pipelines' agreement on the next round has its place among their stages' exchanges.
        in_thread = not self.ring.is_one_rank and not self.ring.lockstep
        self.relay.start(self.relay.follow() if scheduler is None else self.lead(scheduler), in_thread)
        this_round: list[LocalBatch] = []
        while True:
            if not self.relay.ready():
                self._compute_prepared()
            if (batch := self.relay.next()) is None:
                break
            local = self._localise(batch)
            if batch.items or self.ring.lockstep:
                this_round.append(local)
                self._enter(first, local)
            if batch.ends_round:
                for decoder in others:
                    for entered in this_round:
                        self._enter(decoder, entered)
                this_round.clear()
                self.num_rounds += 1
        assert not (self._prepared or self._outputs), "a closing ring has nothing under way"

    def _enter(self, decoder: StageDecoder, local: LocalBatch) -> None:
        """Post the receive of a stage's input, unless it comes from this rank; meanwhile compute the batch before."""
        boundary, receipt = decoder.stage.boundary, None
        channel = self._wires[decoder.stage.index].arriving
        if channel is not None and local.batch.items:
            # The tokens are few, and each tensor-parallel rank has all of them.
            header = boundary.header(local.batch.num_tokens * boundary.num_sharing)
            receipt = self.ring.transport.receive(channel, header)
        self._compute_prepared()
        self._prepared = partial(self._compute, decoder, local, receipt)

    def _compute_prepared(self) -> None:
        if (compute := self._prepared) is not None:
            self._prepared = None
            read = compute()
            if read is not None:
                self.relay.return_tokens(read)

    # ---- one batch, one stage

    def _compute(
        self, decoder: StageDecoder, local: LocalBatch, receipt: Receipt | None = None
    ) -> Callable[[], Tensor] | None:
        """Take a batch through one stage, and pass the output on; the last one returns what waits for its tokens."""
        ring, stage, batch = self.ring, decoder.stage, local.batch
        if ring.alarm.failure is not None:
            ring.alarm.check()
        record = ring.recorder.begin(Action(Op.F, stage.index, batch.slot))
        if not batch.items:
            stage.decode_nothing(local.rows)
            ring.recorder.end(record)
            return None
        wire = self._wires[stage.index]
        if wire.source is None:
            assert local.token_ids is not None, "the rank of the first stage has the tokens"
            x = local.token_ids
        elif receipt is None or wire.arriving is None:
            x = self._outputs.pop((wire.source, batch.slot))
        else:
            ring.recorder.awaits(record, Awaited(wire.direction, wire.source, batch.slot, wire.arriving.source))
            x = receipt.wait().tensors[0]
        ring.recorder.started(record)
        y = decoder.decode(x, local.rows, self._slots[batch.slot])
        read = None
        if wire.target is None:
            read = self._sample(y, local)
        elif wire.leaving is None:
            self._outputs[stage.index, batch.slot] = y
        else:
            ring.transport.send(wire.leaving, Message((y,)))
        ring.recorder.end(record)
        self.num_forwards += 1
        self.num_tokens += len(local.rows.positions)
        self.busy_s += (record.end_ns - record.start_ns) * 1e-9
        return read

    def _sample(self, logits_SV: Tensor, local: LocalBatch) -> Callable[[], Tensor]:
        """Draw the tokens of a batch; returns what waits for them, as `Drawn.packed` gives them, on the host."""
        sampled = local.sampled
        if not sampled:
            return lambda: torch.zeros(0, numbers_per_token(()), dtype=torch.int64)
        drawn = draw_jointly(logits_SV, local.draws, local.joint_draws)
        if drawn.dropped_SV is not None:
            for sequence, dropped_V in zip(sampled, drawn.dropped_SV, strict=True):
                self.generation.filter_masks[sequence.number].append(dropped_V)
        self._last = drawn.tokens, sampled
        read = begin_read(drawn.packed())
        if any(sequence.params.reads_answer for sequence in sampled):
            # The next token's distribution depends on this one, so that it is awaited here.
            numbers_SW = read()
            for sequence, token in zip(sampled, numbers_SW[:, 0].tolist(), strict=True):
                if sequence.params.reads_answer:
                    sequence.drawn.append(token)
            return lambda: numbers_SW
        return read

"""Generation on one rank: batches go through its stages until every sequence has ended.

Where one rank holds the whole model and one slot all sequences, generation is the plain loop of `DecodeLoop.step`:
schedule, run, update. In a ring of ranks or slots the rank of the first stage runs `DecodeLoop.lead`: the same three
calls, but a batch's tokens are awaited only when its slot's next turn comes, while other slots' batches are under way.
The other ranks learn the batches from headers (`penstock.runtime.decode.relay`).

Every rank computes the batches of a round in order, stage by stage. So the messages of each channel arrive in the order
in which they are awaited, and nothing else is ever sent.

Shapes: T tokens of a batch, S sampled ones, D hidden size, V vocabulary.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import schedule
from penstock.model import CachedRows, Draw, draw_tokens
from penstock.model.sampling import Context, numbers_per_token
from penstock.parallel.host import broadcast_value
from penstock.runtime.decode.graphs import StageDecoder
from penstock.runtime.decode.relay import HeaderRelay, Ring, TakenBatch
from penstock.runtime.errors import MessageMismatch, TransportError
from penstock.runtime.trace import Awaited
from penstock.runtime.transport import Receipt
from penstock.schedule import Action, Batch, Direction, Ending, Op, RingShape, Scheduler, Token
from penstock.schedule.recording import Record
from penstock.schedule.rules import Wire


@dataclass(slots=True)
class DecodeReport:
    """Rounds of a rank, its forwards and their tokens, the time they took, and the time of the whole loop."""

    #: of the loop
    num_rounds: int = 0
    #: of this rank
    num_forwards: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    #: of the loop, from the first header to the last
    wall_s: float = 0.0

    def count(self, record: Record, batch: Batch) -> None:
        """Add one forward."""
        self.num_forwards += 1
        self.num_tokens += batch.num_tokens
        self.busy_s += (record.end_ns - record.start_ns) * 1e-9


def _ignore(sequences: list[schedule.Sequence]) -> None:
    """Do nothing with them."""


def _go_on() -> bool:
    """Never interrupt."""
    return False


def _admit_none(scheduler: Scheduler) -> bool:
    """Add no sequences: all are known from the beginning."""
    return False


@dataclass(frozen=True, eq=False)
class Leader:
    """The part of the rank of the first stage beside that of the others; on several ranks a thread calls it.

    scheduler: decides every batch. listen: called with the sequences that have a new token. admit: called before each
    batch; it may add sequences to the scheduler and stop some. It returns whether more may come; where nothing is left
    to compute it waits for them, and the other ranks with it. interrupts: called between two rounds; once it returns
    true, the loop ends with sequences that have no ending, and another one can go on with the same scheduler.
    """

    scheduler: Scheduler
    listen: Callable[[list[schedule.Sequence]], None] = _ignore
    admit: Callable[[Scheduler], bool] = _admit_none
    interrupts: Callable[[], bool] = _go_on


class DecodeLoop:
    """One rank's part in one generation.

    Args:
        ring: links to the other ranks.
        decoders: of the local stages, in order.
        sequences: those known from the beginning; the same on all ranks of the ring.
        shape: slots and rows.
        leader: on the rank of the first stage, and nowhere else.
    """

    #: links to the other ranks
    ring: Ring
    #: local stages with their KV caches, in order
    decoders: Sequence[StageDecoder]
    #: the sequences known from the beginning, by number
    sequences: Sequence[schedule.Sequence]
    #: slots, and rows of each
    shape: RingShape
    #: decides every batch; None but on the rank of the first stage
    leader: Leader | None
    #: passes headers and tokens on
    relay: HeaderRelay
    #: local stage -> where its input comes from and its output goes to
    _wires: dict[int, Wire]
    #: the work that this rank has done so far
    report: DecodeReport
    #: sequence -> for each of its tokens those that could not be drawn; on the rank of the last stage, if asked for
    filter_masks: list[list[Tensor]]
    #: computes the step whose input is awaited
    _prepared: Callable[[], None] | None
    #: (stage, slot) -> its output for this rank's next stage
    _outputs: dict[tuple[int, int], Tensor]

    def __init__(
        self,
        ring: Ring,
        decoders: Sequence[StageDecoder],
        sequences: Sequence[schedule.Sequence],
        shape: RingShape,
        leader: Leader | None = None,
    ) -> None:
        self.ring = ring
        self.decoders = decoders
        self.sequences = sequences
        self.shape = shape
        self.leader = leader
        self.relay = HeaderRelay(ring, shape.rows_per_slot, sequences)
        placement, local = ring.placement, [decoder.stage.index for decoder in decoders]
        self._wires = {stage: Wire.of(placement, stage, Direction.FORWARD) for stage in local}
        self.report = DecodeReport()
        self.filter_masks = [[] for _ in sequences]
        self._prepared = None
        self._outputs = {}

    def run(self) -> DecodeReport:
        """Take part until all sequences have ended, or the leader interrupts. Blocks in the transport.

        Raises:
            TransportError: a message was not sent or did not arrive in time.
        """
        ring, finished = self.ring, False
        try:
            with torch.inference_mode():
                start = time.perf_counter()
                if self.leader is not None and ring.is_one_rank and self.shape.num_slots == 1:
                    while not self.leader.interrupts() and self.step(self.leader):
                        pass
                else:
                    self._go_round()
                self.report.wall_s = time.perf_counter() - start
            ring.transport.settle()
            ring.host.settle()
            finished = True
            return self.report
        except (TransportError, MessageMismatch) as error:
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
        sequences = self.sequences
        if group is not None:
            answers = broadcast_value(_packed_answers(sequences) if self.leader else None, 0, group)
            if self.leader is None:
                _fill_answers(sequences, answers)
        if any(sequence.params.filter_mask for sequence in sequences):
            masks = broadcast_value([_stacked(rows) for rows in self.filter_masks], self.ring.last_rank, group)
            for sequence, mask in zip(sequences, masks, strict=True):
                sequence.filter_mask = mask if sequence.params.filter_mask else None

    # ---- one rank, one slot

    def step(self, leader: Leader) -> bool:
        """Compute one batch on a rank that has the whole model and one slot; False once all sequences have ended."""
        goes_on = leader.admit(leader.scheduler)
        batch = leader.scheduler.schedule()
        if batch is None:
            return goes_on
        tokens = self._run(self.relay.known.take(batch))
        leader.listen(leader.scheduler.update(batch, tokens))
        return True

    def _run(self, taken: TakenBatch) -> list[Token]:
        """The tokens that all stages make of a batch."""
        rows = self._rows(taken.batch)
        self.report.num_rounds += 1
        if not taken.batch.items and not self.ring.lockstep:
            return []
        for decoder in self.decoders:
            self._compute(decoder, taken, rows, None)
        return self.relay.post_tokens(taken.sampled)() if taken.batch.items else []

    # ---- a ring of slots

    def lead(self, leader: Leader) -> Iterator[Batch]:
        """Schedule batch after batch, on the rank of the first stage; each is computed by all ranks in turn."""
        scheduler = leader.scheduler
        in_flight: dict[int, tuple[Batch, Callable[[], list[Token]]]] = {}
        while not (scheduler.is_between_rounds and leader.interrupts()):
            slot = scheduler.next_slot()
            if slot in in_flight:
                batch, wait_for_tokens = in_flight.pop(slot)
                leader.listen(scheduler.update(batch, wait_for_tokens()))
            # The last that are admitted may have come while there was no slot.
            if not leader.admit(scheduler) and slot is None and scheduler.is_idle:
                break
            # An empty one where nothing is asked for, by which the other ranks hear that this one lives.
            batch = scheduler.schedule() or Batch(0, ())
            if batch.items:
                # Posted before anything is sent, so that the tokens are awaited when they come.
                in_flight[batch.slot] = batch, self.relay.post_tokens(scheduler.sampled(batch))
            self.relay.announce(batch)
            yield batch
        for batch, wait_for_tokens in in_flight.values():
            leader.listen(scheduler.update(batch, wait_for_tokens()))
        self.relay.announce(None)

    def _go_round(self) -> None:
        """Compute the batches of each round, stage by stage."""
        first, *others = self.decoders
        batches = self.relay.follow() if self.leader is None else self.lead(self.leader)
        # In lockstep the pipelines' agreement on the next round has its place among their stages' exchanges.
        in_thread = not self.ring.is_one_rank and not self.ring.lockstep
        self.relay.start(batches, in_thread)
        this_round: list[tuple[TakenBatch, CachedRows]] = []
        while (taken := self._next_batch()) is not None:
            if taken.batch.items or self.ring.lockstep:
                this_round.append((taken, self._rows(taken.batch)))
                self._enter(first, *this_round[-1])
            if taken.batch.ends_round:
                for decoder in others:
                    for entered, rows in this_round:
                        self._enter(decoder, entered, rows)
                this_round.clear()
                self.report.num_rounds += 1
        assert not (self._prepared or self._outputs), "a closing ring has nothing under way"

    def _next_batch(self) -> TakenBatch | None:
        if not self.relay.ready():
            self._compute_prepared()
        return self.relay.next()

    def _enter(self, decoder: StageDecoder, taken: TakenBatch, rows: CachedRows) -> None:
        """Post the receive of a stage's input, and meanwhile compute the step before."""
        receipt = self._post_input(decoder, taken.batch)
        self._compute_prepared()
        self._prepared = partial(self._compute, decoder, taken, rows, receipt)

    def _compute_prepared(self) -> None:
        if (compute := self._prepared) is not None:
            self._prepared = None
            compute()

    # ---- one batch, one stage

    def _rows(self, batch: Batch) -> CachedRows:
        # Here and not in the thread of headers, which must not disturb the capture of a CUDA graph.
        return CachedRows.of(batch.items, self.ring.device)

    def _post_input(self, decoder: StageDecoder, batch: Batch) -> Receipt | None:
        """None where the input comes from this rank."""
        stage, boundary = decoder.stage, decoder.stage.boundary
        channel = self._wires[stage.index].arriving
        if channel is None or not batch.items:
            return None
        return self.ring.transport.receive(channel, boundary.whole_shape(batch.num_tokens), boundary.dtype)

    def _compute(self, decoder: StageDecoder, taken: TakenBatch, rows: CachedRows, receipt: Receipt | None) -> None:
        """Take a batch through one stage, and pass the output on."""
        ring, stage, batch = self.ring, decoder.stage, taken.batch
        ring.alarm.check()
        record = ring.recorder.begin(Action(Op.F, stage.index, batch.slot))
        if not batch.items:
            stage.keep_step(rows)
            ring.recorder.end(record)
            return
        x = self._input(decoder, taken, receipt, record)
        ring.recorder.started(record)
        y = decoder.decode(x, rows, self.shape.rows_of(batch.slot))
        wire = self._wires[stage.index]
        if wire.target is None:
            self.relay.return_tokens(self._sample(y, taken))
        elif wire.leaving is None:
            self._outputs[stage.index, batch.slot] = y
        else:
            ring.transport.send(wire.leaving, y.contiguous())
        ring.recorder.end(record)
        self.report.count(record, batch)

    def _input(self, decoder: StageDecoder, taken: TakenBatch, receipt: Receipt | None, record: Record) -> Tensor:
        """Token ids [T] for the first stage, else activations [T, D]."""
        ring, wire, slot = self.ring, self._wires[decoder.stage.index], taken.batch.slot
        if wire.source is None:
            return torch.tensor(_token_ids(taken), dtype=torch.int64).to(ring.device)
        if receipt is None or wire.arriving is None:
            return self._outputs.pop((wire.source, slot))
        ring.recorder.awaits(record, Awaited(wire.direction, wire.source, slot, wire.arriving.source))
        return receipt.wait()

    def _sample(self, logits_SV: Tensor, taken: TakenBatch) -> Tensor:
        """The tokens of a batch, as `Drawn.packed`."""
        draws, sampled = [], taken.sampled
        width = numbers_per_token(sequence.params for sequence in sampled)
        if not sampled:
            return torch.zeros(0, width, dtype=torch.int64)
        for item, sequence in zip(taken.batch.sampled, sampled, strict=True):
            context = Context(sequence.prompt_tokens, sequence.drawn)
            draws.append(Draw(sequence.params, sequence.identity, item.end - len(sequence.prompt_tokens), context))
        drawn = draw_tokens(logits_SV, draws)
        if drawn.dropped_SV is not None:
            for sequence, dropped_V in zip(sampled, drawn.dropped_SV, strict=True):
                self.filter_masks[sequence.number].append(dropped_V)
        numbers_SW = drawn.packed(width)
        for sequence, token in zip(sampled, numbers_SW[:, 0].tolist(), strict=True):
            if sequence.params.reads_answer:
                sequence.drawn.append(token)
        return numbers_SW


def _token_ids(taken: TakenBatch) -> list[int]:
    """The tokens that a batch reads, item by item."""
    ids: list[int] = []
    for item, sequence in zip(taken.batch.items, taken.sequences, strict=True):
        ids += sequence.token_ids[item.start : item.end]
    return ids


def _packed_answers(sequences: Sequence[schedule.Sequence]) -> dict[str, Any]:
    """The answers, as `broadcast_value` can send them in few messages."""
    tokens = [token for sequence in sequences for token in sequence.generated]
    likeliest = [pair for token in tokens for pair in token.likeliest]
    return {
        "lengths": [sequence.num_tokens for sequence in sequences],
        "endings": [sequence.ending and sequence.ending.value for sequence in sequences],
        "ids": torch.tensor([token.id for token in tokens], dtype=torch.int64),
        "log_probs": torch.tensor([(token.log_prob, token.raw_log_prob) for token in tokens], dtype=torch.float64),
        "versions": torch.tensor([token.version for token in tokens], dtype=torch.int64),
        "likeliest": torch.tensor([token for token, _ in likeliest], dtype=torch.int64),
        "likeliest_log_probs": torch.tensor([log_prob for _, log_prob in likeliest], dtype=torch.float64),
    }


def _fill_answers(sequences: Sequence[schedule.Sequence], answers: dict[str, Any]) -> None:
    """Give sequences the answers that were packed elsewhere."""
    tokens = zip(*(answers[kind].tolist() for kind in ("ids", "log_probs", "versions")), strict=True)
    likeliest = zip(answers["likeliest"].tolist(), answers["likeliest_log_probs"].tolist(), strict=True)
    for sequence, length, ending in zip(sequences, answers["lengths"], answers["endings"], strict=True):
        num_likeliest = sequence.params.top_log_probs
        sequence.generated = [
            Token(token, drawn, raw, tuple(itertools.islice(likeliest, num_likeliest)), version)
            for token, (drawn, raw), version in itertools.islice(tokens, length)
        ]
        sequence.ending = ending and Ending(ending)


def _stacked(masks: list[Tensor]) -> Tensor:
    return torch.stack(masks) if masks else torch.empty(0, 0, dtype=torch.bool)

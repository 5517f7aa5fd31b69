"""The scheduler of generation alone: no stage, no tensor, and every state can be looked at."""

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest

from penstock.schedule import NO_ROW, Batch, BatchItem, Ending, RingShape, Scheduler, Sequence, Token
from penstock.settings.sampling import SamplingParams

END = 7
NextToken = Callable[[int, int], int]


def sequences_of(asked: Iterable[tuple[int, int, int]], end_tokens: tuple[int, ...] = ()) -> list[Sequence]:
    """Sequences of (number of the prompt, length of the prompt, new tokens at most); no two prompts begin alike."""
    return [
        Sequence(
            *(number, prompt, 0, range(100 * prompt, 100 * prompt + length)),
            SamplingParams(max_new_tokens, end_tokens=end_tokens),
        )
        for number, (prompt, length, max_new_tokens) in enumerate(asked)
    ]


def sequences_copy(sequences: Iterable[Sequence]) -> list[Sequence]:
    """The same requests, without what has been generated for them."""
    return [Sequence(s.number, s.prompt, s.sample, s.prompt_tokens, s.params, s.identity) for s in sequences]


def as_tokens(ids: Iterable[int]) -> list[Token]:
    return [Token(token) for token in ids]


def never_ends(sequence: int, position: int) -> int:
    return 0


@dataclass
class World:
    """Does what the ring would do, with symbols for tokens, and holds every item against what it should read.

    The cache holds for each row and position the token of a prompt that lies there, or (sequence, position) of an
    answer.
    """

    scheduler: Scheduler
    token: NextToken = never_ends
    stop_when: Callable[[], list[int]] = list
    cache: dict[int, dict[int, int | tuple[int, int]]] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    num_read: Counter[int] = field(default_factory=Counter)
    num_rounds: int = 0

    def run(self) -> "World":
        in_flight: dict[int, Batch] = {}
        turns: list[int] = []
        while (slot := self.scheduler.next_slot()) is not None:
            if slot in in_flight:
                self.update(in_flight.pop(slot))
            batch = self.scheduler.schedule()
            assert batch is not None and batch.slot == slot
            turns.append(slot)
            self.compute(batch)
            if batch.items:
                in_flight[slot] = batch
            if batch.ends_round:
                self.num_rounds += 1
                assert len(set(turns)) == len(turns)
                assert set(in_flight) <= set(turns)
                turns.clear()
        assert not in_flight and not turns
        return self

    def run_late(self) -> "World":
        """As `run`, of one slot whose next batch begins before the last one has come back."""
        in_flight: list[Batch] = []
        while (batch := self.scheduler.schedule()) is not None or in_flight:
            if batch is not None:
                self.compute(batch)
                in_flight.append(batch)
            while len(in_flight) > (0 if batch is None else 1):
                self.update(in_flight.pop(0))
        return self

    def compute(self, batch: Batch) -> None:
        self.batches.append(batch)
        for item in batch.items:
            assert item.row in self.scheduler.shape.rows_of(batch.slot)
            self._copy(item)
        for item in batch.items:
            self._read(item)
        assert len({item.row for item in batch.items}) == len(batch.items)

    def update(self, batch: Batch) -> None:
        self.scheduler.update(batch, as_tokens(self._draw(item) for item in batch.sampled))
        self.scheduler.stop(self.stop_when())

    def _draw(self, item: BatchItem) -> int:
        return self.token(item.sequence, self.scheduler.sequences[item.sequence].num_tokens)

    def symbol(self, sequence: Sequence, position: int) -> int | tuple[int, int]:
        in_prompt = position < len(sequence.prompt_tokens)
        return sequence.prompt_tokens[position] if in_prompt else (sequence.number, position)

    def _copy(self, item: BatchItem) -> None:
        row = self.cache.setdefault(item.row, {})
        if item.source != NO_ROW:
            row.update({position: self.cache[item.source][position] for position in range(item.start)})

    def _read(self, item: BatchItem) -> None:
        sequence, row = self.scheduler.sequences[item.sequence], self.cache[item.row]
        num_prompt_tokens = len(sequence.prompt_tokens)
        for position in range(item.start):
            assert row.get(position) == self.symbol(sequence, position), "a token is read without those before it"
        for position in range(item.start, item.end):
            row[position] = self.symbol(sequence, position)
        # What is drawn is known before it is read, and nothing behind the answer's last token but one is ever read.
        assert item.end <= num_prompt_tokens + sequence.num_tokens + self.scheduler.late
        assert sequence.ending is None
        assert item.sampled == (item.end >= num_prompt_tokens)
        self.num_read[sequence.prompt] += sum(1 for p in range(item.start, item.end) if p < num_prompt_tokens - 1)


def random_world(seed: int) -> World:
    """Some prompts, some samples of each, and a ring of some shape."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 14) for _ in range(draw.randint(0, 9))]
    asked = [
        (prompt, length, draw.randint(1, 9)) for prompt, length in enumerate(lengths) for _ in range(draw.randint(1, 5))
    ]
    shape = RingShape(draw.randint(1, 8), draw.randint(1, 4), draw.randint(1, 6))
    ends = [draw.randint(1, 12) for _ in asked]
    token: NextToken = lambda sequence, position: END if position + 1 == ends[sequence] else 0  # noqa: E731
    sequences = sequences_of(asked, (END,))
    return World(Scheduler(sequences, shape, draw.random() < 0.7, longest_first=draw.random() < 0.5), token)


@pytest.mark.shows(70, 71, 74)
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 500, 100)])
def test_every_answer_is_read_once_whole_and_no_further_than_its_end(seeds: range) -> None:
    num_tokens = 0
    for seed in seeds:
        world = random_world(seed).run()
        sequences = world.scheduler.sequences
        for sequence in sequences:
            tokens, ending, max_new_tokens = sequence.tokens, sequence.ending, sequence.params.max_new_tokens
            assert 1 <= len(tokens) <= max_new_tokens
            assert ending is (Ending.END_TOKEN if tokens[-1] == END else Ending.LENGTH)
            assert ending is Ending.END_TOKEN or len(tokens) == max_new_tokens
            assert END not in tokens[:-1]
            num_tokens += len(tokens)
        # The tokens before a prompt's last are read once, however many samples it has; the others once a sample.
        for sequence in sequences:
            assert world.num_read[sequence.prompt] == len(sequence.prompt_tokens) - 1
        read = sum(batch.num_tokens for batch in world.batches)
        assert read == sum(sequence.num_tokens for sequence in sequences) + sum(world.num_read.values())
    assert num_tokens > 1000


@pytest.mark.shows(208)
def test_tokens_that_are_read_late_are_those_read_at_once() -> None:
    num_wasted = 0
    for seed in range(200):
        one, late = random_world(seed), random_world(seed)
        shape = replace(one.scheduler.shape, num_slots=1)
        for world, num in ((one, 0), (late, 1)):
            world.scheduler = Scheduler(world.scheduler.sequences, shape, world.scheduler.refill, late=num)
        one.run()
        late.run_late()
        answers = [[(s.tokens, s.ending) for s in world.scheduler.sequences] for world in (one, late)]
        assert answers[0] == answers[1]
        # Each sequence that an end token ends is computed once more, and none that its length ends.
        read = [sum(batch.num_tokens for batch in world.batches) for world in (one, late)]
        num_foreseen = sum(len(s.tokens) == s.params.max_new_tokens for s in one.scheduler.sequences)
        assert read[1] - read[0] == len(one.scheduler.sequences) - num_foreseen
        num_wasted += read[1] - read[0]
    assert num_wasted > 100


@pytest.mark.shows(133)
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 400, 100)])
def test_prompts_that_begin_alike_share_whole_pieces_of_what_is_read(seeds: range) -> None:
    """`World` holds every copy, and every token that is read, against the sequence's own."""
    saved = 0
    for seed in seeds:
        draw = random.Random(seed)
        stems = [[draw.randrange(3) for _ in range(draw.randint(0, 20))] for _ in range(2)]
        prompts = [draw.choice(stems) + [draw.randrange(3) for _ in range(draw.randint(1, 9))] for _ in range(9)]
        params = [SamplingParams(draw.randint(1, 9), num_samples=draw.randint(1, 3)) for _ in prompts]
        shape = RingShape(draw.randint(1, 4), draw.randint(1, 4), draw.randint(1, 6))
        sequences = Sequence.all_of(prompts, params)
        world = World(Scheduler(sequences, shape, draw.random() < 0.7, longest_first=draw.random() < 0.5)).run()
        assert all(sequence.ending is Ending.LENGTH for sequence in sequences)
        for number, prompt in enumerate(prompts):
            read = len(prompt) - 1 - world.num_read[number]
            # Pieces are read or shared whole, so a prompt's cuts are those of the prompt alone.
            assert read >= 0 and read % shape.prefill_tokens == 0
            saved += read
        reading = [item for batch in world.batches for item in batch.items if item.length > 1]
        assert all(item.start % shape.prefill_tokens == 0 for item in reading)
    assert saved > 1000


@pytest.mark.shows(133)
def test_eight_prompts_at_once_with_one_beginning_read_it_once() -> None:
    stem = list(range(100, 164))
    sequences = Sequence.all_of([[*stem, number, 1, 2] for number in range(8)], [SamplingParams(4)] * 8)
    world = World(Scheduler(sequences, RingShape(2, 4, prefill_tokens=16))).run()
    assert [world.num_read[number] for number in range(8)] == [66] + [2] * 7


def test_a_row_that_is_to_be_copied_is_not_given_away_before() -> None:
    stem = list(range(100, 116))
    prompts = [[*stem, 1], [*stem, 2, 3], [*stem, 4, 5, 6], [7] * 40, [8] * 40]
    sequences = Sequence.all_of(prompts, [SamplingParams(1)] * 5)
    for rows in (1, 2, 3):
        world = World(Scheduler(sequences_copy(sequences), RingShape(1, rows, prefill_tokens=4))).run()
        assert sum(world.num_read[number] for number in range(3)) == 16 + 1 + 2


@pytest.mark.parametrize("seed", range(40))
def test_no_batch_reads_more_of_prompts_than_the_budget(seed: int) -> None:
    world = random_world(seed).run()
    budget, sequences = world.scheduler.shape.prefill_tokens, world.scheduler.sequences
    for batch in world.batches:
        reading = [i for i in batch.items if i.length > 1 or i.end < len(sequences[i.sequence].prompt_tokens)]
        assert sum(item.length for item in reading) <= budget
        # A prompt's cuts do not depend on what else is read.
        assert all(item.start % budget == 0 for item in reading)


@pytest.mark.shows(74)
def test_a_free_row_is_taken_at_once_while_any_prompt_waits() -> None:
    asked = [(i, 3, length) for i, length in enumerate([1, 9, 3, 2, 8, 1, 1, 5, 4, 2, 6, 3])]
    shape = RingShape(num_slots=2, rows_per_slot=2, prefill_tokens=4)
    world = World(Scheduler(sequences_of(asked), shape)).run()
    waiting = len(asked)
    for batch in world.batches:
        waiting -= sum(1 for item in batch.items if item.start == 0)
        if waiting > 0:
            assert len(batch.items) >= 1
            assert len(batch.items) == 2 or any(item.length == 3 for item in batch.items)
    without = World(Scheduler(sequences_of(asked), shape, refill=False)).run()
    assert world.num_rounds < without.num_rounds


def test_those_that_may_become_longest_are_begun_first_and_end_the_sooner_for_it() -> None:
    asked = [(i, 3, length) for i, length in enumerate([2, 3, 9, 1, 9, 4, 3, 12, 2, 20])]
    shape = RingShape(num_slots=1, rows_per_slot=2)
    worlds = {first: World(Scheduler(sequences_of(asked), shape, longest_first=first)).run() for first in (True, False)}
    begun = {
        first: [item.sequence for batch in world.batches for item in batch.items if item.start == 0]
        for first, world in worlds.items()
    }
    assert begun[True] == [9, 7, 2, 4, 5, 1, 6, 0, 8, 3]
    assert begun[False] == list(range(10))
    assert worlds[True].num_rounds < worlds[False].num_rounds


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 8, 13])
def test_sequences_are_spread_over_the_slots(num_sequences: int) -> None:
    shape = RingShape(num_slots=4, rows_per_slot=16)
    world = World(Scheduler(sequences_of((i, 1, 3) for i in range(num_sequences)), shape)).run()
    first = [len(batch.items) for batch in world.batches[: min(4, num_sequences)]]
    assert sum(first) == num_sequences
    assert max(first) - min(first) <= 1


@pytest.mark.shows(70)
def test_an_idle_slot_takes_what_arrives_before_a_batch_in_flight_is_awaited() -> None:
    first, *others = sequences_of([(prompt, 3, 5) for prompt in range(4)])
    scheduler = Scheduler([first], RingShape(num_slots=2, rows_per_slot=2))
    alone = scheduler.schedule()
    assert alone is not None and alone.ends_round and [item.sequence for item in alone.items] == [0]
    scheduler.add(others)
    joined = scheduler.schedule()
    assert joined is not None and joined.slot != alone.slot and [item.sequence for item in joined.items] == [1, 2]
    in_flight, turns = {alone.slot: alone, joined.slot: joined}, []
    while len(turns) < 5 and (slot := scheduler.next_slot()) is not None:
        turns.append(slot)
        batch = in_flight.pop(slot)
        scheduler.update(batch, as_tokens([0] * len(batch.sampled)))
        in_flight[slot] = scheduler.schedule() or batch
    # The one that has waited longest comes next, round after round.
    assert turns == [alone.slot, joined.slot, alone.slot, joined.slot, alone.slot]


def test_a_stopped_sequence_is_read_no_further_and_frees_its_row() -> None:
    sequences = sequences_of([(0, 2, 50), (1, 2, 3), (2, 2, 3)])
    stop_when = lambda: [0] if sequences[0].num_tokens == 3 else []  # noqa: E731
    World(Scheduler(sequences, RingShape(1, 2)), stop_when=stop_when).run()
    assert [sequence.ending for sequence in sequences] == [Ending.STOPPED, Ending.LENGTH, Ending.LENGTH]
    assert [sequence.num_tokens for sequence in sequences] == [3, 3, 3]


def test_stopping_all_ends_with_what_is_under_way() -> None:
    scheduler = Scheduler(sequences_of((i // 2, 9, 50) for i in range(10)), RingShape(2, 2, prefill_tokens=2))
    first = [scheduler.schedule(), scheduler.schedule()]
    assert all(batch is not None and batch.items for batch in first)
    scheduler.stop(range(10))
    last: list[Batch | None] = []
    for batch in first:
        assert batch is not None and scheduler.next_slot() == batch.slot
        assert scheduler.update(batch, []) == []
        last.append(scheduler.schedule())
    assert last == [Batch(0, (), ends_round=False), Batch(1, (), ends_round=True)]
    assert scheduler.next_slot() is None


def test_a_prompt_whose_reader_was_stopped_is_read_anew() -> None:
    scheduler = Scheduler(sequences_of([(0, 6, 2), (0, 6, 2)]), RingShape(1, 2, prefill_tokens=2))
    batch = scheduler.schedule()
    assert batch is not None and batch.items == (BatchItem(0, 0, 0, 2, sampled=False),)
    scheduler.stop([0])
    scheduler.update(batch, [])
    World(scheduler).run()
    assert [sequence.tokens for sequence in scheduler.sequences] == [(), (0, 0)]


@pytest.mark.parametrize("seed", range(40))
def test_the_plain_loop_and_the_ring_generate_the_same_with_one_slot(seed: int) -> None:
    """Tokens may come back at once, or when the slot has its next turn: the batches are the same."""

    def world() -> World:
        made = random_world(seed)
        scheduler = made.scheduler
        shape = RingShape(1, scheduler.shape.rows_per_slot, scheduler.shape.prefill_tokens)
        return World(Scheduler(scheduler.sequences, shape, scheduler.refill), made.token)

    plain, ring = world(), world().run()
    while (batch := plain.scheduler.schedule()) is not None:
        plain.compute(batch)
        plain.update(batch)
    assert plain.batches == ring.batches
    assert [s.generated for s in plain.scheduler.sequences] == [s.generated for s in ring.scheduler.sequences]


@pytest.mark.parametrize("num_more_rounds", [0, 3])
def test_in_lockstep_every_slot_has_a_turn_until_no_pipeline_goes_on(num_more_rounds: int) -> None:
    asked: list[bool] = []
    num_rounds_of_others = 12 + num_more_rounds

    def any_goes_on(goes_on: bool) -> bool:
        asked.append(goes_on)
        return goes_on or len(asked) <= num_rounds_of_others

    world = World(Scheduler(sequences_of([(0, 1, 4), (1, 1, 9)]), RingShape(3, 1), any_goes_on=any_goes_on)).run()
    assert asked == [True] * 10 + [False] * (num_rounds_of_others - 9)
    assert [batch.slot for batch in world.batches] == [0, 1, 2] * num_rounds_of_others


def test_what_a_stopped_prompt_has_left_is_cleaned_with_the_next_sequence_in_its_row() -> None:
    one, two = Sequence.all_of([[1, 2, 3, 4, 5], [6, 7, 8]], [SamplingParams()] * 2)
    scheduler = Scheduler([one, two], RingShape(num_slots=1, rows_per_slot=1, prefill_tokens=2))
    cleaned = []
    for stops in ([], [one.number], [], []):
        batch = scheduler.schedule()
        assert batch is not None
        # It is under way as it is stopped.
        scheduler.stop(stops)
        scheduler.update(batch, [Token(0) for _ in batch.sampled])
        cleaned += [(item.sequence, item.start, item.cleaned) for item in batch.items]
    assert cleaned == [(one.number, 0, 0), (one.number, 2, 0), (two.number, 0, 4), (two.number, 2, 0)]


def test_what_an_answer_stopped_meanwhile_has_left_is_cleaned_if_it_is_not_finite() -> None:
    one, two = Sequence.all_of([[1, 2, 3], [6, 7, 8, 9]], [SamplingParams()] * 2)
    scheduler = Scheduler([one, two], RingShape(num_slots=1, rows_per_slot=1))
    batch = scheduler.schedule()
    assert batch is not None and batch.items == (BatchItem(one.number, 0, 0, 3, sampled=True),)
    scheduler.stop([one.number])
    assert scheduler.update(batch, [Token(0, math.nan)]) == []
    batch = scheduler.schedule()
    assert batch is not None and batch.items == (BatchItem(two.number, 0, 0, 4, sampled=True, cleaned=3),)


def test_a_row_stays_to_be_cleaned_when_its_next_sequence_is_stopped_before_it_reads() -> None:
    prompts = [[100 * n + i for i in range(9)] for n in range(4)]
    scheduler = Scheduler(Sequence.all_of(prompts, [SamplingParams()] * 4), RingShape(1, 2, prefill_tokens=4))
    # Sequence 1 has row 1 and reads all of its prompt; meanwhile row 0 goes from 0 to 2 and to 3.
    items = []
    for stopped in ([0], [2], [], []):
        batch = scheduler.schedule()
        assert batch is not None
        scheduler.update(batch, [Token(0) for _ in batch.sampled])
        scheduler.stop(stopped)
        items += [(item.sequence, item.row, item.start, item.end, item.cleaned) for item in batch.items]
    assert items == [(0, 0, 0, 4, 0), (1, 1, 0, 4, 0), (1, 1, 4, 8, 0), (1, 1, 8, 9, 0), (3, 0, 0, 4, 4)]

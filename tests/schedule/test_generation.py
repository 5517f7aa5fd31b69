"""The conductor of generation alone: no stage, no tensor, and every state can be looked at."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from penstock.schedule import NO_ROW, Conductor, Ending, Piece, RingShape, Visit, Wish

END = 7
Token = Callable[[int, int], int]


def never_ends(sequence: int, position: int) -> int:
    return 0


@dataclass
class World:
    """Does what the ring would do, with symbols for tokens, and holds every piece against what it should read.

    The cache holds for each row and position which token lies there: (prompt, position), or (sequence, position).
    """

    conductor: Conductor
    token: Token = never_ends
    stop_when: Callable[[], list[int]] = list
    cache: dict[int, dict[int, tuple[str, int, int]]] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)
    num_read: Counter[int] = field(default_factory=Counter)
    num_rounds: int = 0

    def run(self) -> "World":
        under_way: dict[int, tuple[Piece, ...]] = {}
        while turns := self.conductor.begin_round():
            self.num_rounds += 1
            assert len(set(turns)) == len(turns)
            for slot in turns:
                assert self.conductor.in_flight(slot) == (slot in under_way)
                if slot in under_way:
                    drawn = [self._draw(piece) for piece in under_way.pop(slot) if piece.sampled]
                    self.conductor.take(slot, drawn)
                    self.conductor.stop(self.stop_when())
                pieces = self.conductor.visit(slot)
                self.visits.append(Visit(slot, pieces))
                for piece in pieces:
                    assert piece.row in self.conductor.shape.rows_of(slot)
                    self._copy(piece)
                for piece in pieces:
                    self._read(piece)
                assert len({piece.row for piece in pieces}) == len(pieces)
                if pieces:
                    under_way[slot] = pieces
        assert not under_way
        return self

    def _draw(self, piece: Piece) -> int:
        return self.token(piece.sequence, len(self.conductor.tokens[piece.sequence]))

    def symbol(self, sequence: int, position: int) -> tuple[str, int, int]:
        wish = self.conductor.wishes[sequence]
        in_prompt = position < wish.num_prompt_tokens
        return ("prompt", wish.prompt, position) if in_prompt else ("answer", sequence, position)

    def _copy(self, piece: Piece) -> None:
        row = self.cache.setdefault(piece.row, {})
        if piece.source != NO_ROW:
            row.update({position: self.cache[piece.source][position] for position in range(piece.start)})

    def _read(self, piece: Piece) -> None:
        wish, row = self.conductor.wishes[piece.sequence], self.cache[piece.row]
        for position in range(piece.start):
            assert row.get(position) == self.symbol(piece.sequence, position), "a token is read without those before it"
        for position in range(piece.start, piece.end):
            row[position] = self.symbol(piece.sequence, position)
        # What is drawn is known before it is read, and nothing behind the answer's last token but one is ever read.
        assert piece.end <= wish.num_prompt_tokens + len(self.conductor.tokens[piece.sequence])
        assert self.conductor.endings[piece.sequence] is None
        assert piece.sampled == (piece.end >= wish.num_prompt_tokens)
        self.num_read[wish.prompt] += sum(1 for p in range(piece.start, piece.end) if p < wish.num_prompt_tokens - 1)


def random_world(seed: int) -> World:
    """Some prompts, some samples of each, and a ring of some shape."""
    draw = random.Random(seed)
    lengths = [draw.randint(1, 14) for _ in range(draw.randint(0, 9))]
    wishes = [
        Wish(prompt, length, draw.randint(1, 9), frozenset([END]))
        for prompt, length in enumerate(lengths)
        for _ in range(draw.randint(1, 5))
    ]
    shape = RingShape(draw.randint(1, 8), draw.randint(1, 4), draw.randint(1, 6))
    ends = [draw.randint(1, 12) for _ in wishes]
    token: Token = lambda sequence, position: END if position + 1 == ends[sequence] else 0  # noqa: E731
    return World(Conductor(wishes, shape, draw.random() < 0.7, longest_first=draw.random() < 0.5), token)


@pytest.mark.shows(70, 71, 74)
@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 500, 100)])
def test_every_answer_is_read_once_whole_and_no_further_than_its_end(seeds: range) -> None:
    num_tokens = 0
    for seed in seeds:
        world = random_world(seed).run()
        conductor = world.conductor
        for sequence, wish in enumerate(conductor.wishes):
            tokens, ending = conductor.tokens[sequence], conductor.endings[sequence]
            assert 1 <= len(tokens) <= wish.max_new_tokens
            assert ending is (Ending.END_TOKEN if tokens[-1] == END else Ending.LENGTH)
            assert ending is Ending.END_TOKEN or len(tokens) == wish.max_new_tokens
            assert END not in tokens[:-1]
            num_tokens += len(tokens)
        # The tokens before a prompt's last are read once, however many samples it has; the others once a sample.
        for wish in conductor.wishes:
            assert world.num_read[wish.prompt] == wish.num_prompt_tokens - 1
        read = sum(visit.num_tokens for visit in world.visits)
        assert read == sum(map(len, conductor.tokens)) + sum(world.num_read.values())
    assert num_tokens > 1000


@pytest.mark.parametrize("seed", range(40))
def test_no_visit_reads_more_of_prompts_than_the_budget(seed: int) -> None:
    world = random_world(seed).run()
    budget = world.conductor.shape.prefill_tokens
    for visit in world.visits:
        reading = [
            p for p in visit.pieces if p.length > 1 or p.end < world.conductor.wishes[p.sequence].num_prompt_tokens
        ]
        assert sum(piece.length for piece in reading) <= budget
        # A prompt's cuts do not depend on what else is read.
        assert all(piece.start % budget == 0 for piece in reading)


@pytest.mark.shows(74)
def test_a_free_row_is_taken_at_once_while_any_prompt_waits() -> None:
    answers = [1, 9, 3, 2, 8, 1, 1, 5, 4, 2, 6, 3]
    shape = RingShape(num_slots=2, rows_per_slot=2, prefill_tokens=4)
    world = World(Conductor([Wish(i, 3, length) for i, length in enumerate(answers)], shape)).run()
    waiting = len(answers)
    for visit in world.visits:
        waiting -= sum(1 for piece in visit.pieces if piece.start == 0)
        if waiting > 0:
            assert len(visit.pieces) >= 1
            assert len(visit.pieces) == 2 or any(piece.length == 3 for piece in visit.pieces)
    without = World(Conductor(world.conductor.wishes, shape, refill=False)).run()
    assert world.num_rounds < without.num_rounds


def test_those_that_may_become_longest_are_begun_first_and_end_the_sooner_for_it() -> None:
    answers = [2, 3, 9, 1, 9, 4, 3, 12, 2, 20]
    shape = RingShape(num_slots=1, rows_per_slot=2)
    wishes = [Wish(i, 3, length) for i, length in enumerate(answers)]
    worlds = {first: World(Conductor(wishes, shape, longest_first=first)).run() for first in (True, False)}
    begun = {
        first: [piece.sequence for visit in world.visits for piece in visit.pieces if piece.start == 0]
        for first, world in worlds.items()
    }
    assert begun[True] == [9, 7, 2, 4, 5, 1, 6, 0, 8, 3]
    assert begun[False] == list(range(10))
    assert worlds[True].num_rounds < worlds[False].num_rounds


@pytest.mark.parametrize("num_sequences", [1, 2, 3, 5, 8, 13])
def test_sequences_are_spread_over_the_slots(num_sequences: int) -> None:
    shape = RingShape(num_slots=4, rows_per_slot=16)
    world = World(Conductor([Wish(i, 1, 3) for i in range(num_sequences)], shape)).run()
    first = [len(visit.pieces) for visit in world.visits[: min(4, num_sequences)]]
    assert sum(first) == num_sequences
    assert max(first) - min(first) <= 1


@pytest.mark.shows(70)
def test_nothing_wanted_is_over_at_once() -> None:
    assert Conductor([], RingShape(3, 2)).begin_round() == ()


def test_a_stopped_sequence_is_read_no_further_and_frees_its_row() -> None:
    conductor = Conductor([Wish(0, 2, 50), Wish(1, 2, 3), Wish(2, 2, 3)], RingShape(1, 2))
    world = World(conductor, stop_when=lambda: [0] if len(conductor.tokens[0]) == 3 else [])
    world.run()
    assert conductor.endings == [Ending.STOPPED, Ending.LENGTH, Ending.LENGTH]
    assert [len(tokens) for tokens in conductor.tokens] == [3, 3, 3]


def test_stopping_all_ends_with_what_is_under_way() -> None:
    conductor = Conductor([Wish(i // 2, 9, 50) for i in range(10)], RingShape(2, 2, prefill_tokens=2))
    first = [conductor.visit(slot) for slot in conductor.begin_round()]
    assert all(first)
    conductor.stop(range(10))
    assert [conductor.take(slot, []) for slot in conductor.begin_round()] == [[], []]
    assert [conductor.visit(slot) for slot in range(2)] == [(), ()]
    assert conductor.begin_round() == ()


def test_a_prompt_whose_reader_was_stopped_is_read_anew() -> None:
    wishes = [Wish(0, 6, 2), Wish(0, 6, 2)]
    conductor = Conductor(wishes, RingShape(1, 2, prefill_tokens=2))
    assert conductor.visit(0) == (Piece(0, 0, 0, 2, sampled=False),)
    conductor.stop([0])
    conductor.take(0, [])
    world = World(conductor)
    world.run()
    assert conductor.tokens == [[], [0, 0]]


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_ring_without_slots_rows_or_budget_is_refused(counts: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0"):
        RingShape(*counts)

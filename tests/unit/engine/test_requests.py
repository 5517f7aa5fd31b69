"""Requests that join and leave a running generation: each answer is the one it has alone."""

import random
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from penstock.engine.generation.options import GenerateOptions
from penstock.engine.generation.requests import QueueError, RequestQueue, TokenDelta
from penstock.model import CacheSize
from penstock.runtime import DecodeLoop, FixedDecoder, Generation, Recorder, Ring, StageDecoder
from penstock.runtime.decode.relay import packed_header, packed_news, unpacked_header
from penstock.schedule import Batch, BatchItem, Ending, Placement, PlacementKind, RingShape, Scheduler, Sequence, Token
from penstock.settings import ModelConfig, SamplingParams
from tests.generation import CONFIG, Lines, ThreadTransport, generate_together, ring_stages, run_together

MAX_LENGTH, PREFILL_TOKENS = 48, 4
UNSOUND = replace(CONFIG, max_length=MAX_LENGTH)


class Published:
    """What a queue publishes, by answer."""

    def __init__(self) -> None:
        self.deltas: defaultdict[int, list[TokenDelta]] = defaultdict(list)
        self.changed = threading.Condition()

    def take(self, deltas: list[TokenDelta]) -> None:
        with self.changed:
            for delta in deltas:
                self.deltas[delta.number].append(delta)
            self.changed.notify_all()

    def wait_for(self, number: int, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.deltas[number]) >= count, 540)

    def tokens(self, number: int) -> list[Token]:
        return [delta.token for delta in self.deltas[number]]


def open_ring(
    num_ranks: int,
    num_slots: int,
    requests: RequestQueue,
    stages_per_rank: int = 1,
    config: ModelConfig = CONFIG,
    fixed: bool = False,
) -> list[DecodeLoop]:
    placement, shape = (
        Placement(PlacementKind.LOOP, num_ranks, stages_per_rank),
        RingShape(num_slots, 2, PREFILL_TOKENS),
    )
    size = CacheSize(shape.num_rows, MAX_LENGTH, torch.float32, torch.device("cpu"))
    activations, host, stages = Lines(), Lines(), ring_stages(placement, config)
    loops = []
    for rank in range(num_ranks):
        local = [stage for number, stage in stages.items() if placement.rank_of(number) == rank]
        ring = Ring(
            placement, ThreadTransport(activations, rank), ThreadTransport(host, rank), Recorder(rank), size.device
        )
        caches = [stage.new_caches(size) for stage in local]
        decoders = [
            FixedDecoder(stage, own, MAX_LENGTH) if fixed else StageDecoder(stage, own)
            for stage, own in zip(local, caches, strict=True)
        ]
        generation = Generation((), shape)
        if rank == 0:
            generation = Generation((), shape, Scheduler((), shape), requests.report, requests.admit)
        loops.append(DecodeLoop(ring, decoders, generation))
    return loops


def drawn_params(draw: random.Random) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=draw.randint(1, 20),
        temperature=draw.choice([0, 1.0, 0.7]),
        seed=draw.randint(0, 1000),
        num_samples=draw.randint(1, 3),
        repetition_penalty=draw.choice([1.0, 1.3]),
        logit_bias={3: 1.5} if draw.random() < 0.5 else {},
        bad_words=((1, 2), (5,)) if draw.random() < 0.5 else (),
        raw_log_probs=True,
        top_log_probs=draw.choice([0, 2, 5]),
    )


def assert_same(got: list[Token], expected: list[Token]) -> None:
    """The same tokens; a product over other rows may round its sums otherwise."""
    assert [token.id for token in got] == [token.id for token in expected]
    for ours, theirs in zip(got, expected, strict=True):
        assert [token for token, _ in ours.likeliest] == [token for token, _ in theirs.likeliest]
        numbers = [[own.log_prob, own.raw_log_prob, *(value for _, value in own.likeliest)] for own in (ours, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5)


@pytest.mark.parametrize(("num_ranks", "num_slots", "stages_per_rank"), [(1, 1, 1), (1, 2, 1), (2, 2, 1), (2, 3, 2)])
def test_answers_that_join_and_leave_at_random_are_those_of_each_request_alone(
    num_ranks: int, num_slots: int, stages_per_rank: int
) -> None:
    draw, published = random.Random(num_ranks + num_slots), Published()
    requests = RequestQueue(num_slots * 2, 1000, None, published.take)
    loops = open_ring(num_ranks, num_slots, requests, stages_per_rank)
    running = threading.Thread(target=run_together, args=(loops,))
    running.start()
    asked, cancelled = [], set()
    for _ in range(16):
        prompts = [[draw.randrange(97) for _ in range(draw.randint(1, 12))] for _ in range(draw.randint(1, 2))]
        params = drawn_params(draw)
        asked.append((prompts, params, requests.submit(prompts, params)))
        if draw.random() < 0.3:
            leaving = draw.sample(asked[-1][2], 1)
            if draw.random() < 0.5:
                published.wait_for(leaving[0], 1)
            requests.cancel(leaving)
            cancelled |= set(leaving)
        if draw.random() < 0.3:
            staying = [number for number in asked[-1][2] if number not in cancelled]
            for number in staying:
                published.wait_for(number, 1)
    requests.close("the test ends")
    running.join(60)
    assert not running.is_alive()
    assert len(cancelled) > 1
    for prompts, params, numbers in asked:
        alone = generate_together(1, prompts, params, GenerateOptions(prefill_tokens=PREFILL_TOKENS)).answers
        assert len(alone) == len(numbers) == len(prompts) * params.num_samples
        for number, answer in zip(numbers, alone, strict=True):
            got = published.tokens(number)
            assert_same(got, answer.generated[: len(got)])
            if number not in cancelled:
                assert published.deltas[number][-1].ending is answer.ending
                assert len(got) == answer.num_tokens
    assert requests.counts == (0, 0)
    for loop in loops:
        assert len(loop.live_sequences) <= num_slots * 2 + 3, "ended sequences are kept"
        assert loop.ring.host.num_pending() == loop.ring.transport.num_pending() == 0


@contextmanager
def unsound_token(loops: list[DecodeLoop], token: int) -> Iterator[None]:
    """While it lasts, a token's embedding is not a number, in stages that no other test has."""
    _, embedding = next(iter(loops[0].decoders[0].stage.named_parameters()))
    kept = embedding[token].clone()
    with torch.no_grad():
        embedding[token] = torch.nan
    try:
        yield
    finally:
        with torch.no_grad():
            embedding[token] = kept


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize(("num_ranks", "num_slots"), [(1, 1), (2, 2)])
def test_an_answer_whose_logits_are_not_finite_ends_alone(num_ranks: int, num_slots: int, fixed: bool) -> None:
    published, bad = Published(), CONFIG.vocabulary - 1
    requests = RequestQueue(2 * num_slots, 1000, None, published.take)
    loops = open_ring(num_ranks, num_slots, requests, config=UNSOUND, fixed=fixed)
    params = SamplingParams(max_new_tokens=6, temperature=0, bad_words=((bad,),), num_samples=2)
    sound = [[5, 3], [7, 7, 9, 4, 1, 2, 3], [8], [1, 2, 3, 4, 5, 6], [4, 4]]
    unsound = [[bad], [1, 2, 3, 4, bad], [7, 7, 9, 4, 1, bad, 2, 3, 4]]
    with unsound_token(loops, bad):
        ended = {number for prompt in unsound for number in requests.submit([prompt], params)}
        answered = [requests.submit([prompt], params) for prompt in sound]
        ended |= set(requests.submit(unsound, params))
        answered += [requests.submit([prompt], params) for prompt in sound]
        requests.close("the test ends")
        run_together(loops)
    assert {tuple(own.ending for own in published.deltas[number]) for number in ended} == {(Ending.NOT_FINITE,)}
    options = GenerateOptions(prefill_tokens=PREFILL_TOKENS)
    for prompt, numbers in zip(sound * 2, answered, strict=True):
        for number, answer in zip(numbers, generate_together(1, [prompt], params, options).answers, strict=True):
            assert_same(published.tokens(number), answer.generated)
            assert published.deltas[number][-1].ending is Ending.LENGTH
    assert requests.counts == (0, 0)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_row_that_computes_while_nobody_has_it_leaves_nothing_to_the_next(num_ranks: int) -> None:
    published, bad = Published(), CONFIG.vocabulary - 1
    requests = RequestQueue(2, 10, None, published.take)
    loops = open_ring(num_ranks, 1, requests, config=UNSOUND, fixed=True)
    params = SamplingParams(max_new_tokens=40, temperature=0, bad_words=((bad,),))
    with unsound_token(loops, bad):
        running = threading.Thread(target=run_together, args=(loops,))
        failing, other = requests.submit([[bad], [5, 3]], params)
        running.start()
        published.wait_for(failing, 1)
        published.wait_for(other, 6)
        (next_one,) = requests.submit([[8]], params)
        requests.close("the test ends")
        running.join(60)
    assert [delta.ending for delta in published.deltas[failing]] == [Ending.NOT_FINITE]
    for number, prompt in ((other, [5, 3]), (next_one, [8])):
        assert_same(published.tokens(number), generate_together(1, [prompt], params).answers[0].generated)


def test_a_queue_takes_no_more_than_it_may_and_nothing_once_it_is_closed() -> None:
    requests = RequestQueue(2, 1, None, list.clear)
    first = requests.submit([[1], [2]], SamplingParams())
    with pytest.raises(QueueError, match="2 answers"):
        requests.submit([[1]], SamplingParams(num_samples=2))
    requests.submit([[1]], SamplingParams())
    with pytest.raises(QueueError, match="answers are waiting or running"):
        requests.submit([[1]], SamplingParams())
    requests.cancel(first)
    requests.submit([[1]], SamplingParams(num_samples=2))
    requests.close("it was told to end")
    with pytest.raises(QueueError, match="told to end"):
        requests.submit([[1]], SamplingParams())


def test_a_batch_is_the_same_behind_a_header_with_all_settings_of_what_has_arrived() -> None:
    params = drawn_params(random.Random(3))
    sequence = Sequence(9, 4, 1, [5, 6, 7], params, identity=(1 << 64) - 1)
    item = BatchItem(9, row=1, start=0, length=3, sampled=True, cleaned=2)
    batch = Batch(1, (item,), ends_round=False, arrived=(sequence,), ended=(7, 8))
    news = packed_news(batch)
    assert news is not None
    got = unpacked_header(packed_header(batch, 40, len(news)).tolist(), news)
    assert got is not None
    assert (got.slot, got.items, got.ends_round, got.ended) == (1, (item,), False, (7, 8))
    (arrived,) = got.arrived
    assert (arrived.number, arrived.prompt, arrived.sample, arrived.prompt_tokens) == (9, 4, 1, [5, 6, 7])
    assert (arrived.params, arrived.identity, arrived.ending) == (params, sequence.identity, None)
    assert packed_news(Batch(1, (item,))) is None
    assert unpacked_header(packed_header(None, 40).tolist()) is None


class Letters:
    """A tokenizer whose tokens are letters, the last of them several."""

    def decode(self, tokens: list[int]) -> str:
        return "".join(("a", "b", "c", "d", "acd")[token] for token in tokens)


@pytest.mark.parametrize(
    ("tokens", "texts", "ending"),
    [
        ((1, 2, 3), ["b", "", ""], Ending.STOPPED),
        ((1, 4), ["b", "a"], Ending.STOPPED),
        ((1, 2), ["b", "c"], Ending.LENGTH),
    ],
)
def test_a_stop_string_ends_an_answer_with_the_batch_that_completes_it_and_all_before_it_is_shown(
    tokens: tuple[int, ...], texts: list[str], ending: Ending
) -> None:
    published = Published()
    requests = RequestQueue(1, 0, Letters(), published.take)
    most = len(tokens) if ending is Ending.LENGTH else 9
    (number,) = requests.submit([[1]], SamplingParams(max_new_tokens=most, stop=("cd",)))
    scheduler = Scheduler((), RingShape(1, 1))
    for token in tokens:
        assert requests.admit(scheduler)
        batch = scheduler.schedule()
        assert batch is not None and batch.num_tokens == 1
        requests.report(scheduler.update(batch, [Token(token)]))
    assert [delta.text for delta in published.deltas[number]] == texts
    assert [delta.ending for delta in published.deltas[number]] == [*(None for _ in texts[1:]), ending]
    requests.close("")
    assert not requests.admit(scheduler)
    batch = scheduler.schedule()
    assert batch is None or not batch.items
    assert scheduler.schedule() is None and scheduler.is_idle

"""Microbatches as the user made them: from a list or drawn from a source, bit for bit those of a plain loop."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import Engine, EngineOptions, Layout, MicroBatchSpec, PackedBatch, StepError
from penstock.engine import num_loss_tokens, token_cross_entropy
from penstock.model import decoder_units
from penstock.runtime import PipelineError
from tests.dist.grid_cases import DENSE
from tests.dist.launch import run_ranks
from tests.dist.test_microbatches import VOCAB, WIDTH, batch_of, engine_of, gradients_of, layers, outputs_of, plainly

NUM = 9
SPEC = MicroBatchSpec(num=NUM)
DIVISOR = 64.0


def drawn_at_random(num: int = NUM) -> Iterator[PackedBatch]:
    """Microbatches of any lengths, drawn from torch's own generator, as a data loader of a user's may."""
    for _ in range(num):
        lengths = torch.randint(1, 7, (int(torch.randint(1, 4, ())),)).tolist()
        yield PackedBatch.from_documents([torch.randint(0, VOCAB, (n,)) for n in lengths])


def known(seed: int = 0, num: int = NUM) -> list[PackedBatch]:
    torch.manual_seed(seed)
    return list(drawn_at_random(num))


def watched(source: Iterator[PackedBatch], most: list[int]) -> Iterator[PackedBatch]:
    """The same in memory that is filled again, with a note of how many copies are alive when the next is drawn."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    copied, buffers = PackedBatch.with_data, {key: torch.empty(64, dtype=torch.int64) for key in ("tokens", "labels")}

    def watched_copy(own: PackedBatch, data: Mapping[str, Tensor]) -> PackedBatch:
        alive.add(data["tokens"])
        return copied(own, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedBatch, "with_data", watched_copy)
        for microbatch in source:
            length = microbatch.num_tokens
            yield copied(microbatch, {key: own[:length].copy_(microbatch[key]) for key, own in buffers.items()})
            del microbatch
            most.append(len(alive))


def has_source(engine: Engine) -> bool:
    return engine.pipeline.holds_first_stage or engine.pipeline.holds_last_stage


def decoder(pp: int, schedule: str) -> Engine:
    """A decoder of Penstock's own, whose ranks need the lengths of messages beforehand."""
    units = partial(decoder_units, DENSE)
    still = partial(torch.optim.SGD, lr=0.0)
    options = EngineOptions(schedule, timeout_s=30.0)
    return Engine(lambda groups: units(groups=groups), DENSE.hidden_size, Layout(pp=pp), options, optimizer=still)


def drawing(rank: int, pp: int, cases: Sequence[tuple[Callable[..., Engine], str]]) -> list[list[Any]]:
    """Of each case: losses, gradients and scores of sources and lists, and the most microbatches alive at once."""
    found = []
    for make, schedule in cases:
        engine, most = make(pp, schedule), list[int]()

        def source(num: int = NUM, engine: Engine = engine, most: list[int] = most) -> Iterator[PackedBatch] | None:
            return watched(drawn_at_random(num), most) if has_source(engine) else None

        torch.manual_seed(0)
        steps = []
        # The second step goes on with the random numbers of the first.
        for _ in range(2):
            taken = engine.train_batch(source(), micro_batches=SPEC, normalize=DIVISOR)  # pyright: ignore[reportArgumentType]
            steps += [taken.loss, gradients_of(engine), taken.num_tokens, taken.num_microbatches]
        given = known() if has_source(engine) else [own.without_data() for own in known()]
        mean = engine.train_batch(iter(given), micro_batches=SPEC, normalize="token_per_microbatch")
        steps += [mean.loss, gradients_of(engine), engine.train_batch(given).loss]
        others = known(1)
        torch.manual_seed(0)
        evaluated = engine.evaluate([source(), others], micro_batches=SPEC)  # pyright: ignore[reportArgumentType]
        torch.manual_seed(0)
        scores = engine.forward(source(), micro_batches=SPEC, broadcast=True)  # pyright: ignore[reportArgumentType]
        assert torch.equal(scores, engine.forward(known(), broadcast=True))
        found.append([*steps, float(evaluated), scores, max(most, default=0)])
        engine.close()
    return found


CASES = {
    1: [(engine_of, "1f1b")],
    2: [(engine_of, "zb-v"), (engine_of, "combined-1f1b"), (decoder, "interleaved"), (decoder, "dualpipe")],
    3: [(engine_of, "1f1b"), (decoder, "zb-v")],
    4: [(decoder, "1f1b")],
}


def of_lists() -> list[Any]:
    """What `drawing` finds of a decoder, from one process that is given lists."""
    engine = decoder(1, "1f1b")
    torch.manual_seed(0)
    steps = []
    for _ in range(2):
        taken = engine.train_batch(list(drawn_at_random()), normalize=DIVISOR)
        steps += [taken.loss, gradients_of(engine), taken.num_tokens, NUM]
    mean = engine.train_batch(known(), normalize="token_per_microbatch")
    steps += [mean.loss, gradients_of(engine), engine.train_batch(known()).loss]
    return [*steps, float(engine.evaluate([known(), known(1)])), engine.forward(known())]


def of_plain_loop() -> list[Any]:
    """The same of a user's own layers, from a plain loop."""
    torch.manual_seed(0)
    first, second = list(drawn_at_random()), list(drawn_at_random())
    found: list[Any] = []
    for microbatches in (first, second):
        loss, gradients = plainly(microbatches, DIVISOR)
        found += [loss, gradients, sum(own.num_tokens for own in microbatches), NUM]

    def mean_loss(output: Tensor, own: PackedBatch) -> Tensor:
        return token_cross_entropy(output, own) * (1.0 / (num_loss_tokens(own) * NUM) if num_loss_tokens(own) else 0.0)

    found += [*plainly(first, 1.0, loss_fn=mean_loss), plainly(first)[0]]
    sums = [plainly(microbatches, 1.0)[0] for microbatches in (first, known(1))]
    weight = sum(map(num_loss_tokens, [*first, *known(1)]))
    return [*found, sum(sums) / weight, torch.cat(outputs_of(layers(), first, 1))]


@pytest.mark.shows(176)
@pytest.mark.parametrize("pp", CASES)
def test_microbatches_are_the_users_own(pp: int) -> None:
    by_rank = [drawing(0, 1, CASES[1])] if pp == 1 else run_ranks(pp, drawing, pp, CASES[pp], timeout_s=120.0)
    wanted = {engine_of: of_plain_loop(), decoder: of_lists() if pp > 1 else []}
    for number, (make, schedule) in enumerate(CASES[pp]):
        own = [found[number] for found in by_rank]
        for place, expected in enumerate(wanted[make]):
            values = [found[place] for found in own]
            if isinstance(expected, dict):
                merged = {name: value for of_rank in values for name, value in of_rank.items()}
                is_same = all(merged[name] == own for name, own in expected.items())
            elif isinstance(expected, Tensor):
                is_same = all(torch.equal(value, expected) for value in values)
            else:
                is_same = values == [expected] * pp
            # A bidirectional model adds two sums.
            assert is_same or (schedule == "dualpipe" and place in (0, 1, 4, 5, 8, 9, 10)), (schedule, place)
        # Of a microbatch only what its last backward needs is kept, wherever the source is.
        assert all(found[-1] <= 2 * pp + 2 for found in own) or schedule == "dualpipe", schedule


def beside_others(rank: int) -> list[Any]:
    """Of two pipelines, each with a source of its own: a step, and evaluations of unequally many."""
    engine = Engine.from_layers(layers(), WIDTH, Layout(dp=2), EngineOptions(timeout_s=30.0))
    own = engine.evaluate([iter(known(0)), iter(known(1))][: 2 - rank], micro_batches=SPEC)
    taken = engine.train_batch(iter(known(rank)), micro_batches=SPEC, normalize=DIVISOR)
    with pytest.raises(PipelineError, match="or all iterators of as many microbatches: rank 0 has an iterator of 9"):
        engine.train_batch(batch_of(NUM) if rank else iter(known()), micro_batches=SPEC, normalize=DIVISOR)
    engine.close()
    return [float(own), taken.loss, taken.num_tokens]


@pytest.mark.shows(176)
def test_each_pipeline_draws_its_own() -> None:
    batches = [known(0), known(1), known(0)]
    sums, weight = [plainly(own, 1.0)[0] for own in batches], sum(num_loss_tokens(m) for own in batches for m in own)
    loss = sum(plainly(own, DIVISOR)[0] for own in batches[:2])
    by_rank = run_ranks(2, beside_others)
    assert by_rank[0] == by_rank[1]
    assert by_rank[0][:2] == pytest.approx([sum(sums) / weight, loss], rel=1e-6)
    assert by_rank[0][2] == sum(m.num_tokens for own in batches[:2] for m in own)


# ---- sources that cannot be used


def failing(rank: int) -> list[str]:
    """The sentences of steps that fail; after each, one that does not has the bits of a fresh engine."""
    engine, words = engine_of(2, "1f1b"), list[str]()
    stream = itertools.chain.from_iterable(known(seed) for seed in itertools.count())
    good = engine.train_batch(iter(known(7)), micro_batches=SPEC, normalize=DIVISOR)
    wanted = good.loss, gradients_of(engine)

    def attempt(source: Any, micro_batches: MicroBatchSpec = SPEC, **others: Any) -> None:
        with pytest.raises((StepError, PipelineError, ValueError)) as caught:
            engine.train_batch(source, micro_batches=micro_batches, normalize=DIVISOR, **others)
        words.append(str(caught.value))
        taken = engine.train_batch(iter(known(7)), micro_batches=SPEC, normalize=DIVISOR)
        assert (taken.loss, gradients_of(engine)) == wanted and taken.step == engine.step

    def broken(number: int) -> Iterator[PackedBatch]:
        yield from known()[:number]
        raise OSError("the disk is gone")

    def calling(call: Callable[[], object]) -> Iterator[PackedBatch]:
        yield from known()[:3]
        call()
        yield from known()[3:]

    changed = known()
    if rank:
        changed[4] = known(3)[0]
    values = known()
    if rank:
        values[5] = values[5].with_data({**(values[5].data or {}), "tokens": values[5]["tokens"] * 0})

    def fails_once(logits: Tensor, microbatch: PackedBatch) -> Tensor:
        raise OSError("no loss")

    attempt(iter(known()[:6]))
    attempt(broken(3) if rank else iter(known()))
    attempt(iter(changed))
    attempt(iter(values))
    attempt(iter([*known()[:2], 3] if rank else known()))
    attempt(iter(known()), MicroBatchSpec(num=NUM, max_tokens=3))
    attempt(stream, loss_fn=fails_once)
    attempt(iter(known()), MicroBatchSpec(num=NUM - rank))
    attempt(calling(lambda: engine.evaluate([known()])))
    attempt(calling(lambda: engine.forward(known())) if rank else iter(known()))
    # All ranks' sources stand at one place, though not all had drawn as many.
    taken = engine.train_batch(stream, micro_batches=SPEC, normalize=DIVISOR)
    engine.close()
    return [*words, str(taken.loss)]


@pytest.mark.shows(176)
def test_a_source_that_cannot_be_used_is_named_and_leaves_no_trace() -> None:
    first, second = run_ranks(2, failing, timeout_s=120.0)
    sentences = [
        "the iterator ended before microbatch 6 of 9; let it give as many",
        "the iterator failed at microbatch 3 of 9: OSError: the disk is gone",
        "microbatch 4 differs between ranks that share a batch: the iterators of ranks 0 and 1 gave",
        "the iterators of ranks 0 and 1 gave the same lengths and ids, but other values",
        "microbatch 2 of 9: batch: an int; give a PackedBatch",
        "tokens, but micro_batches allows 3",
        "no loss",
        "all iterators of as many microbatches: rank 0 has an iterator of 9 microbatches; rank 1 has an iterator of 8",
        "the engine was called while it is drawing microbatch 3 of 9; a loss, a hook, a listener or an iterator",
        "the engine was called while it is drawing microbatch 3 of 9; a loss, a hook, a listener or an iterator",
    ]
    for sentence, *words in zip(sentences, first, second, strict=False):
        assert all(sentence in own for own in words), (sentence, words)
    assert first[-1] == second[-1] == str(plainly(known(1), DIVISOR)[0])


@pytest.mark.shows(176)
@pytest.mark.parametrize("wrong", [0, 4, NUM - 1])
def test_a_step_that_fails_takes_its_microbatches_and_no_other(wrong: int) -> None:
    microbatches: list[Any] = known(num=NUM + 2)
    microbatches[wrong] = "no batch"
    source = iter(microbatches)
    with pytest.raises(ValueError, match=f"microbatch {wrong} of {NUM}"):
        engine_of(1, "1f1b").train_batch(source, micro_batches=SPEC, normalize=DIVISOR)
    assert [left.num_tokens for left in source] == [left.num_tokens for left in microbatches[NUM:]]


@pytest.mark.shows(176)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "how many microbatches an iterator gives is known to the caller alone"),
        (
            {"micro_batches": SPEC},
            "normalize = 'global' needs the counts of all microbatches before the first backward",
        ),
        ({"micro_batches": SPEC, "normalize": "dp"}, "give the divisor itself, as in normalize=4096.0"),
        ({"micro_batches": SPEC, "normalize": 0.0}, "normalize = 0.0 is no divisor of a loss"),
        ({"micro_batches": SPEC, "normalize": True}, "normalize = True is no divisor of a loss"),
    ],
)
def test_a_source_needs_its_number_and_a_divisor(given: dict[str, Any], message: str) -> None:
    engine = engine_of(1, "1f1b")
    source = iter(known())
    with pytest.raises(ValueError, match=message):
        engine.train_batch(source, **given)
    assert len(list(source)) == NUM, "nothing is drawn before"
    with pytest.raises(ValueError, match="asks for 10 microbatches, but the list has 9"):
        engine.train_batch(known(), micro_batches=MicroBatchSpec(num=10))
    with pytest.raises(ValueError, match="an empty list; give at least one microbatch"):
        engine.forward([])

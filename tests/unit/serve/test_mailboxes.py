"""Mailboxes of requests, and figures, without HTTP and without a model."""

import asyncio
import math
from collections.abc import Sized

import pytest

from penstock.data.tokenizer import TokenizationError
from penstock.engine.generation.requests import RequestQueue, TokenDelta
from penstock.schedule import Ending, RingShape, Scheduler, Token
from penstock.serve.asked import CompletionRequest
from penstock.serve.mailboxes import Mailbox, Mailboxes
from penstock.serve.refusals import RefusalError
from penstock.settings import SamplingParams


def asked(num_samples: int = 1, stream: bool = False) -> CompletionRequest:
    params = SamplingParams(max_new_tokens=2, num_samples=num_samples)
    return CompletionRequest([[1, 2]], params, stream, False, None, False)


def mailboxes() -> Mailboxes:
    return Mailboxes(lambda publish: RequestQueue(2, 1, None, publish))


async def taken(mailbox: Mailbox) -> list[int]:
    """Tokens of all answers, as they come."""
    return [delta.token.id async for deltas in mailbox.deltas() for delta in deltas]


def compute(boxes: Mailboxes) -> None:
    """Answer all requests with the tokens 0, 1, 2, ... in the order in which they are sampled."""
    scheduler, number = Scheduler((), RingShape(1, 2)), 0
    boxes.queue.admit(scheduler)
    while (batch := scheduler.schedule()) is not None:
        tokens = [Token(number + place) for place in range(len(batch.sampled))]
        boxes.queue.report(scheduler.update(batch, tokens))
        number += len(tokens)


@pytest.mark.parametrize("stream", [False, True])
def test_each_request_gets_its_own_tokens_in_order(stream: bool) -> None:
    async def run() -> None:
        boxes = mailboxes()
        boxes.open(asyncio.get_running_loop())
        first, second = boxes.submit(asked(2, stream)), boxes.submit(asked(1, stream))
        await asyncio.to_thread(compute, boxes)
        # The first sample and the other request have the two rows first, and then the second sample has one.
        assert await taken(first) == [0, 2, 4, 5]
        assert await taken(second) == [1, 3]
        assert boxes.leave(first) == boxes.leave(second) == 0

    asyncio.run(run())


class Fails:
    """A tokenizer that cannot write the token 1."""

    def decode(self, tokens: list[int]) -> str:
        if 1 in tokens:
            raise TokenizationError("the tokenizer fails")
        return "a" * len(tokens)


def test_an_answer_that_the_tokenizer_cannot_write_ends_alone() -> None:
    async def run() -> None:
        boxes = Mailboxes(lambda publish: RequestQueue(2, 1, Fails(), publish))
        boxes.open(asyncio.get_running_loop())
        # The first has the tokens 0 and 2, and the other begins with 1.
        first, second = boxes.submit(asked()), boxes.submit(asked())
        await asyncio.to_thread(compute, boxes)
        assert await taken(first) == [0, 2]
        with pytest.raises(RefusalError, match="the tokenizer fails") as caught:
            await taken(second)
        assert (caught.value.status, caught.value.code) == (500, "tokenizer")
        assert sum(boxes.queue.counts) == 0

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_the_first_token_is_taken_before_the_last_one_is_there(stream: bool) -> None:
    async def run() -> None:
        mailbox = Mailbox([0], stream)
        deltas = mailbox.deltas()
        for ending in (None, Ending.LENGTH):
            mailbox.put(TokenDelta(0, Token(7), "", ending))
            assert [delta.ending for delta in await asyncio.wait_for(anext(deltas), 60)] == [ending]

    asyncio.run(run())


def test_who_leaves_ends_what_is_left_of_a_request() -> None:
    async def run() -> None:
        boxes = mailboxes()
        boxes.open(asyncio.get_running_loop())
        leaving = boxes.submit(asked(3))
        with pytest.raises(RefusalError, match="3 answers are waiting or running"):
            boxes.submit(asked())
        assert boxes.leave(leaving) == 3
        assert boxes.leave(leaving) == 0
        staying = boxes.submit(asked())
        await asyncio.to_thread(compute, boxes)
        assert await taken(staying) == [0, 1]

    asyncio.run(run())


def test_a_closed_server_finishes_and_a_failed_one_refuses_what_is_open() -> None:
    async def run() -> None:
        boxes = mailboxes()
        boxes.open(asyncio.get_running_loop())
        running, open_one = boxes.submit(asked()), boxes.submit(asked())
        boxes.close("it was told to end")
        with pytest.raises(RefusalError, match="told to end") as refused:
            boxes.submit(asked())
        assert refused.value.status == 503
        token = Token(7)
        boxes.publish(
            [TokenDelta(0, token, "", None), TokenDelta(0, token, "", Ending.LENGTH), TokenDelta(1, token, "", None)]
        )
        boxes.fail("rank 1 died")
        assert await taken(running) == [7, 7]
        with pytest.raises(RefusalError, match="rank 1 died") as refused:
            await taken(open_one)
        assert refused.value.status == 503

    asyncio.run(run())


def test_an_answer_that_is_not_finite_ends_its_request_and_no_other() -> None:
    async def run() -> None:
        boxes = mailboxes()
        boxes.open(asyncio.get_running_loop())
        failing, other = boxes.submit(asked(2, stream=True)), boxes.submit(asked())
        token = Token(7)
        boxes.publish([TokenDelta(0, token, "", None), TokenDelta(2, token, "", None)])
        boxes.publish(
            [TokenDelta(1, Token(0, math.nan), "", Ending.NOT_FINITE), TokenDelta(2, token, "", Ending.LENGTH)]
        )
        with pytest.raises(RefusalError, match="the logits of this answer are not finite") as refused:
            await taken(failing)
        assert refused.value.status == 500
        assert await taken(other) == [7, 7]
        assert boxes.leave(failing) == 1, "its other answer goes on"

    asyncio.run(run())


def test_a_failure_after_the_last_token_takes_nothing_away() -> None:
    async def run() -> None:
        mailbox = Mailbox([0], stream=False)
        mailbox.put(TokenDelta(0, Token(7), "", Ending.LENGTH))
        mailbox.fail(RefusalError(503, "too late"))
        assert await taken(mailbox) == [7]

    asyncio.run(run())


def test_a_queue_that_is_served_does_not_grow_with_its_prompts() -> None:
    queue, scheduler = RequestQueue(2, 10, None, lambda deltas: None), Scheduler((), RingShape(1, 2))

    def held_after(num_prompts: int) -> int:
        """The number of things that scheduler and queue hold, once these have been answered."""
        for _ in range(num_prompts):
            queue.submit([[1, 2]], SamplingParams(max_new_tokens=2))
            queue.admit(scheduler)
            while not scheduler.is_idle:
                batch = scheduler.schedule()
                assert batch is not None
                queue.report(scheduler.update(batch, [Token(0) for _ in batch.sampled]))
        held = [value for one in (queue, scheduler) for value in vars(one).values() if isinstance(value, Sized)]
        return sum(map(len, held))

    assert held_after(3) == held_after(20)

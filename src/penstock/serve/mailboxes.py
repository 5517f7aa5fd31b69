"""The mailboxes between the thread that generates and the event loop of HTTP: requests in, new tokens out."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from penstock.engine.generation.answers import NOT_FINITE
from penstock.engine.generation.requests import QueueError, RequestQueue, TokenDelta
from penstock.schedule import Ending
from penstock.serve.asked import CompletionRequest
from penstock.serve.refusals import RefusalError

QUEUE_FULL = "queue_full"
"""The code of a refusal of what may be taken later."""


@dataclass(eq=False)
class Mailbox:
    """The answers to one request as they grow, for the coroutine that replies."""

    #: the answers, in the order of the request's choices
    numbers: list[int]
    #: True if each token is waited for, and not only the first and the end
    stream: bool
    #: answer -> its place among the request's choices
    places: dict[int, int] = field(init=False)
    #: what has come and was not yet taken
    _deltas: list[TokenDelta] = field(default_factory=list, init=False)
    #: answers that have not ended
    _num_open: int = field(init=False)
    #: True once there has been a token
    _has_begun: bool = field(default=False, init=False)
    #: set when there is something to take
    _ready: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    #: why no more will come
    _failure: RefusalError | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.places = {number: place for place, number in enumerate(self.numbers)}
        self._num_open = len(self.numbers)

    def put(self, delta: TokenDelta) -> None:
        if delta.ending is Ending.NOT_FINITE:
            self.fail(RefusalError(500, f"the logits of this answer {NOT_FINITE}", None, "not_finite"))
            return
        if delta.failure is not None:
            self.fail(RefusalError(500, delta.failure, None, "tokenizer"))
            return
        is_first, self._has_begun = not self._has_begun, True
        self._deltas.append(delta)
        self._num_open -= delta.ending is not None
        if self.stream or is_first or self._num_open == 0:
            self._ready.set()

    def fail(self, failure: RefusalError) -> None:
        self._failure = failure
        self._ready.set()

    async def deltas(self) -> AsyncIterator[list[TokenDelta]]:
        """Yield what answers have grown by, until all have ended.

        Raises:
            RefusalError: with status 503, where the server cannot finish them, or 500, where one of them cannot go on.
        """
        num_open = len(self.places)
        while num_open:
            await self._ready.wait()
            self._ready.clear()
            taken, self._deltas = self._deltas, []
            num_open -= sum(delta.ending is not None for delta in taken)
            yield taken
            if num_open and self._failure is not None:
                raise self._failure


class Mailboxes:
    """All mailboxes of a server; but for `publish`, `close` and `fail`, its methods belong to the event loop's thread.

    Args:
        make_queue: makes the engine's queue, which publishes deltas by the function that it is given.
    """

    #: the engine's queue
    queue: RequestQueue
    #: answer -> where its new tokens go
    _mailboxes: dict[int, Mailbox]
    #: runs the coroutines that reply; None before `open`
    _loop: asyncio.AbstractEventLoop | None
    #: why requests are refused; None while they are not
    refused: str | None

    def __init__(self, make_queue: Callable[[Callable[[list[TokenDelta]], object]], RequestQueue]) -> None:
        self.queue = make_queue(self.publish)
        self._mailboxes, self._loop, self.refused = {}, None, None

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; to be called before any request."""
        self._loop = loop

    def submit(self, asked: CompletionRequest) -> Mailbox:
        """Ask for answers.

        Raises:
            RefusalError: with status 429 or 503, where they cannot be taken.
        """
        try:
            numbers = self.queue.submit(asked.prompts, asked.params_of_each or asked.params)
        except QueueError as error:
            if self.refused is not None:
                raise RefusalError(503, str(error), None, "server_ended") from None
            raise RefusalError(429, f"{error}; try again later", None, QUEUE_FULL) from None
        mailbox = Mailbox(numbers, asked.stream)
        self._mailboxes |= dict.fromkeys(numbers, mailbox)
        return mailbox

    def leave(self, mailbox: Mailbox) -> int:
        """End what is left of a request; returns how many of its answers had not ended."""
        left = [number for number in mailbox.places if self._mailboxes.pop(number, None) is not None]
        if left:
            self.queue.cancel(left)
        return len(left)

    # ---- in other threads

    def publish(self, deltas: list[TokenDelta]) -> None:
        """Give what one batch has made to the mailboxes."""

        def deliver() -> None:
            for delta in deltas:
                mailbox = self._mailboxes.get(delta.number)
                if mailbox is not None:
                    if delta.ending is not None:
                        del self._mailboxes[delta.number]
                    mailbox.put(delta)

        self._call(deliver)

    def close(self, reason: str) -> None:
        """Refuse requests from now on; those that were taken are answered."""
        self.refused = self.refused or reason
        self.queue.close(reason)

    def fail(self, reason: str) -> None:
        """Refuse requests, and end those that are being answered."""

        def end_all() -> None:
            for mailbox in set(self._mailboxes.values()):
                mailbox.fail(RefusalError(503, reason, None, "server_ended"))

        self.close(reason)
        self._call(end_all)

    def _call(self, action: Callable[[], None]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(action)

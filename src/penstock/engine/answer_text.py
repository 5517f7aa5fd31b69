"""The text of an answer as its tokens come, up to a stop string."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Decodes(Protocol):
    """Anything that makes text of token ids, such as a tokenizer of transformers."""

    def decode(self, tokens: list[int], /) -> Any: ...


_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# No character takes more tokens than this; a broken one is shown after that many.
_MAX_HELD_TOKENS = 8


class AnswerText:
    """The text of one answer, token by token.

    tokenizer: None leaves the text empty. stop: texts of which the first to appear ends the answer and is cut off.
    """

    #: the text so far
    text: str
    #: True once it holds one of the texts that end it
    stopped: bool
    #: None if answers are shown as token ids
    _tokenizer: Decodes | None
    #: the texts that end it
    _stop: tuple[str, ...]
    #: the tokens so far
    _tokens: list[int]
    #: tokens are decoded in their context, from the last position at which text and tokens ended together
    _begin: int
    _end: int
    #: characters of the text that have been shown
    _shown: int

    def __init__(self, tokenizer: Decodes | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens = []
        self._begin = self._end = 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Add a token; returns the text that can be shown from now on."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._end])
        now = self._tokenizer.decode(self._tokens[self._begin :])
        num_held = len(self._tokens) - self._end
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and num_held < _MAX_HELD_TOKENS):
            return ""
        self.text += now[len(before) :]
        self._begin, self._end = self._end, len(self._tokens)
        self._cut()
        return self._show(0 if self.stopped else self._num_doubtful())

    def finish(self) -> str:
        """End the answer; returns the text that was held back."""
        if self._tokenizer is not None and not self.stopped:
            before = self._tokenizer.decode(self._tokens[self._begin : self._end])
            self.text += self._tokenizer.decode(self._tokens[self._begin :])[len(before) :]
            self._cut()
        return self._show(0)

    def _cut(self) -> None:
        found = [place for stop in self._stop if (place := self.text.find(stop)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True

    def _num_doubtful(self) -> int:
        """Number of characters at the end that may begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0

    def _show(self, num_held: int) -> str:
        shown, self._shown = self._shown, max(self._shown, len(self.text) - num_held)
        return self.text[shown : self._shown]

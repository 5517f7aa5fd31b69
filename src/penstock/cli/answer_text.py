"""An answer's text while it grows: what can be shown already, and whether a stop string has come."""

from collections.abc import Sequence

from penstock.data.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# No character takes more tokens than this, so one that is broken shows after so many.
_MAX_HELD_TOKENS = 8


class AnswerText:
    """The text of one answer, token by token.

    tokenizer: None where there is none; the text is empty then. stop: texts of which the first to come ends the
    answer; it does not belong to it.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str] = ()) -> None:
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._tokens: list[int] = []
        # Tokens are decoded in their context, from the last place at which text and tokens were seen to end together.
        self._begin = self._end = 0
        self._shown = 0
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """Take one more token; gives what can be shown now and could not before."""
        if self._tokenizer is None or self.stopped:
            return ""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._begin : self._end])
        now = self._tokenizer.decode(self._tokens[self._begin :])
        held = len(self._tokens) - self._end
        if len(now) <= len(before) or (now.endswith(_UNFINISHED) and held < _MAX_HELD_TOKENS):
            return ""
        self.text += now[len(before) :]
        self._begin, self._end = self._end, len(self._tokens)
        self._cut()
        return self._show(0 if self.stopped else self._num_doubtful())

    def finish(self) -> str:
        """The answer has ended; gives what was held back."""
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
        """Characters at the end that may turn out to begin a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stop):
                return length
        return 0

    def _show(self, num_held: int) -> str:
        shown, self._shown = self._shown, max(self._shown, len(self.text) - num_held)
        return self.text[shown : self._shown]

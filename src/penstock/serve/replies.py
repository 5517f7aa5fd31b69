"""Replies in the form of OpenAI's interface: whole ones, and the parts of streamed ones."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.data.token_texts import TokenTexts
from penstock.engine.requests import Growth
from penstock.schedule import Ending, Token
from penstock.serve.asked import AskedAnswers
from penstock.serve.log_probs import ChoiceLogProbs

_FINISHED = {Ending.END_TOKEN: "stop", Ending.STOPPED: "stop", Ending.LENGTH: "length"}


class Reply:
    """The reply to one request, of which parts can be written as its answers grow."""

    #: the request
    asked: AskedAnswers
    #: the fields that all parts have
    _id: str
    _created: int
    _model: str
    #: choice -> its text, its tokens and its ending so far
    texts: list[str]
    tokens: list[list[Token]]
    endings: list[Ending | None]
    #: choice -> what describes its tokens' log-probabilities
    _choice_log_probs: list[ChoiceLogProbs]

    def __init__(self, asked: AskedAnswers, model: str, texts: TokenTexts) -> None:
        self.asked, self._model = asked, model
        self._id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.texts = [""] * asked.num_choices
        self.tokens = [[] for _ in range(asked.num_choices)]
        self.endings = [None] * asked.num_choices
        self._choice_log_probs = [ChoiceLogProbs(texts) for _ in range(asked.num_choices)]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = self.asked.num_prompt_tokens, self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def add(self, place: int, growth: Growth) -> None:
        """Take what the choice at this place has grown by."""
        self.texts[place] += growth.text
        self.tokens[place].append(growth.token)
        self.endings[place] = growth.ending

    # ---- whole

    def whole(self) -> dict[str, Any]:
        """The reply with all choices."""
        choices = [self._choice(place) for place in range(self.asked.num_choices)]
        return {**self._head(streamed=False), "choices": choices, "usage": self.usage}

    def _choice(self, place: int) -> dict[str, Any]:
        choice = {
            "index": place,
            "finish_reason": _finish_reason(self.endings[place]),
            "logprobs": self._log_probs(place, self.tokens[place]),
        }
        if self.asked.is_chat:
            return {**choice, "message": {"role": "assistant", "content": self.texts[place], "refusal": None}}
        return {**choice, "text": self.texts[place]}

    # ---- in parts

    def openings(self) -> list[dict[str, Any]]:
        """The parts that come before any token."""
        if not self.asked.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._part({"index": place, "delta": delta}, None) for place in range(self.asked.num_choices)]

    def part(self, place: int, growth: Growth) -> dict[str, Any] | None:
        """The part for what a choice has grown by; None if there is nothing to show yet."""
        if not growth.text and growth.ending is None and self.asked.num_log_probs is None:
            return None
        choice = {"index": place, "logprobs": self._log_probs(place, [growth.token])}
        choice |= {"delta": {"content": growth.text}} if self.asked.is_chat else {"text": growth.text}
        return self._part(choice, _finish_reason(growth.ending))

    def closing(self) -> dict[str, Any] | None:
        """The part that comes last, with the numbers of tokens; None unless they were asked for."""
        if not self.asked.include_usage:
            return None
        return {**self._head(streamed=True), "choices": [], "usage": self.usage}

    def _part(self, choice: dict[str, Any], finish_reason: str | None) -> dict[str, Any]:
        return {**self._head(streamed=True), "choices": [{**choice, "finish_reason": finish_reason}]}

    # ---- what both have

    def _head(self, streamed: bool) -> dict[str, Any]:
        kind = f"chat.completion{'.chunk' if streamed else ''}" if self.asked.is_chat else "text_completion"
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model}

    def _log_probs(self, place: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self.asked.num_log_probs is None:
            return None
        if self.asked.is_chat:
            return self._choice_log_probs[place].of_chat(tokens)
        return self._choice_log_probs[place].of_completion(tokens, with_likeliest=self.asked.num_log_probs > 0)


def _finish_reason(ending: Ending | None) -> str | None:
    return None if ending is None else _FINISHED[ending]

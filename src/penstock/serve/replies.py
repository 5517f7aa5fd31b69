"""Replies in the form of OpenAI's interface: whole ones, and the parts of streamed ones."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from penstock.data.tokenizer import TokenTexts
from penstock.engine.generation.answers import AnswerText
from penstock.engine.generation.requests import TokenDelta
from penstock.schedule import Ending, Token
from penstock.serve.asked import CompletionRequest

# ---- Log-probabilities of an answer's tokens in the two forms of OpenAI's interface


class ChoiceLogProbs:
    """The log-probabilities of one choice; each token is to be given once, in order."""

    #: the text and the bytes of each token
    _texts: TokenTexts
    #: the text so far, of whole characters
    _answer: AnswerText
    #: True until a token has had a text
    _first: bool

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._answer = texts, AnswerText(texts.tokenizer)
        self._first = True

    def of_chat(self, tokens: Sequence[Token]) -> dict[str, Any]:
        """The field `logprobs` of a chat completion."""
        content = []
        for token in tokens:
            names = self._names(token)
            likeliest = [self._entry(names, one, value) for one, value in token.likeliest]
            content.append({**self._entry(names, token.id, token.raw_log_prob), "top_logprobs": likeliest})
            self._pass(token.id)
        return {"content": content, "refusal": None}

    def of_completion(self, tokens: Sequence[Token], with_likeliest: bool) -> dict[str, Any]:
        """The field `logprobs` of a completion."""
        drawn, likeliest, offsets = [], [], []
        for token in tokens:
            names = self._names(token)
            drawn.append(names[token.id])
            likeliest.append({names[one]: value for one, value in reversed(token.likeliest)})
            offsets.append(self._pass(token.id))
        return {
            "tokens": drawn,
            "token_logprobs": [token.raw_log_prob for token in tokens],
            "top_logprobs": likeliest if with_likeliest else None,
            "text_offset": offsets,
        }

    def _names(self, token: Token) -> dict[int, str]:
        return self._texts.names([token.id, *(one for one, _ in token.likeliest)], self._first)

    def _entry(self, names: dict[int, str], token: int, log_prob: float | None) -> dict[str, Any]:
        content = self._texts.bytes_of(token, self._first)
        return {"token": names[token], "logprob": log_prob, "bytes": None if content is None else list(content)}

    def _pass(self, token: int) -> int:
        """Go on to the next token; returns the number of whole characters before it."""
        length = len(self._answer.text)
        self._first = self._first and self._texts.bytes_of(token, first=False) is None
        self._answer.add(token)
        return length


_FINISHED = {Ending.END_TOKEN: "stop", Ending.STOPPED: "stop", Ending.LENGTH: "length"}


class Reply:
    """The reply to one request, of which parts can be written as its answers grow."""

    #: the request
    asked: CompletionRequest
    #: the fields that all parts have
    _id: str
    _created: int
    _model: str
    #: the texts of single tokens
    _texts: TokenTexts
    #: choice -> its text, its tokens and its ending so far
    texts: list[str]
    tokens: list[list[Token]]
    endings: list[Ending | None]
    #: choice -> what describes its tokens' log-probabilities
    _choice_log_probs: list[ChoiceLogProbs]

    def __init__(self, asked: CompletionRequest, model: str, texts: TokenTexts) -> None:
        self.asked, self._model, self._texts = asked, model, texts
        self._id = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self.texts = [""] * asked.num_choices
        self.tokens = [[] for _ in range(asked.num_choices)]
        self.endings = [None] * asked.num_choices
        self._choice_log_probs = [ChoiceLogProbs(texts) for _ in range(asked.num_choices)]

    @property
    def num_tokens(self) -> int:
        num_known = sum(len(params.begins_with) for params in self.asked.params_of_each)
        return sum(map(len, self.tokens)) - num_known * self.asked.params.num_samples

    @property
    def usage(self) -> dict[str, int]:
        prompt, new = self.asked.num_prompt_tokens, self.num_tokens
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def add(self, place: int, delta: TokenDelta) -> None:
        """Take what the choice at this place has grown by."""
        self.texts[place] += delta.text
        self.tokens[place].append(delta.token)
        self.endings[place] = delta.ending

    # ---- whole

    def whole(self) -> dict[str, Any]:
        """The reply with all choices."""
        choices = [self._choice(place) for place in range(self.asked.num_choices)]
        return {**self._head(streamed=False), "choices": choices, "usage": self.usage}

    def _choice(self, place: int) -> dict[str, Any]:
        if self.asked.echoed:
            return self._echo(place)
        choice = {
            "index": place,
            "finish_reason": _finish_reason(self.endings[place]),
            "logprobs": self._log_probs(place, self.tokens[place]),
        }
        if self.asked.is_chat:
            return {**choice, "message": {"role": "assistant", "content": self.texts[place], "refusal": None}}
        return {**choice, "text": self.texts[place]}

    def _echo(self, place: int) -> dict[str, Any]:
        """A choice of a completion that repeats its prompt, whose first token follows nothing."""
        prompt = self.asked.echoed[place // self.asked.params.num_samples]
        known = prompt[:1] if self.asked.params_of_each else prompt
        tokens, answer = [*map(Token, known), *self.tokens[place]], AnswerText(self._texts.tokenizer)
        text = "".join(answer.add(token.id) for token in tokens) + answer.finish()
        log_probs = self._log_probs(place, tokens)
        for name in ("token_logprobs", "top_logprobs"):
            if log_probs is not None and log_probs[name] is not None:
                log_probs[name][0] = None
        ending = _finish_reason(self.endings[place])
        return {"index": place, "finish_reason": ending, "logprobs": log_probs, "text": text}

    # ---- in parts

    def openings(self) -> list[dict[str, Any]]:
        """The parts that come before any token."""
        if not self.asked.is_chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [self._part({"index": place, "delta": delta}, None) for place in range(self.asked.num_choices)]

    def part(self, place: int, delta: TokenDelta) -> dict[str, Any] | None:
        """The part for what a choice has grown by; None if there is nothing to show yet."""
        if not delta.text and delta.ending is None and self.asked.num_log_probs is None:
            return None
        choice = {"index": place, "logprobs": self._log_probs(place, [delta.token])}
        choice |= {"delta": {"content": delta.text}} if self.asked.is_chat else {"text": delta.text}
        return self._part(choice, _finish_reason(delta.ending))

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

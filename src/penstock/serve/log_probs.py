"""Log-probabilities of an answer's tokens in the two forms of OpenAI's interface."""

from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Any

from penstock.data.token_texts import TokenTexts
from penstock.engine.answer_text import AnswerText
from penstock.schedule import Token


class ChoiceLogProbs:
    """The log-probabilities of one choice; each token is to be given once, in order."""

    #: the text and the bytes of each token
    _texts: TokenTexts
    #: the text so far, of tokens that ended together with it, and the bytes of tokens after those
    _answer: AnswerText
    _open: bytes
    #: True until a token has had a text
    _first: bool

    def __init__(self, texts: TokenTexts) -> None:
        self._texts, self._answer = texts, AnswerText(texts.tokenizer)
        self._open, self._first = b"", True

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

    def _entry(self, names: dict[int, str], token: int, log_prob: float) -> dict[str, Any]:
        content = self._texts.bytes_of(token, self._first)
        return {"token": names[token], "logprob": log_prob, "bytes": None if content is None else list(content)}

    def _pass(self, token: int) -> int:
        """Go on to the next token; returns the number of characters before the one that holds this one's first byte."""
        content, length = self._texts.bytes_of(token, self._first) or b"", len(self._answer.text)
        self._first = self._first and self._texts.bytes_of(token, first=False) is None
        # What may become a whole character is one; a token without bytes stands where the next one may continue it.
        through = utf_8_decode(self._open + content[:1], "replace", bool(content))[0]
        offset = length + len(through) - bool(content)
        self._answer.add(token)
        text, own = self._answer.text, content.decode(errors="replace")
        if len(text) == length:
            self._open += content
            return offset
        self._open = b""
        # A decoder may show broken characters before this token as more or fewer than were counted.
        return len(text) - len(own) if text.endswith(own) else offset

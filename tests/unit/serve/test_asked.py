"""Requests and replies without HTTP: what is read of one, and the places of tokens in a streamed one."""

from typing import Any

from penstock.data.token_texts import TokenTexts
from penstock.data.tokenizer import ByteTokenizer
from penstock.engine.requests import Growth
from penstock.model import Limits
from penstock.schedule import Token
from penstock.serve.asked import AskedAnswers, ServedModel, read_completion
from penstock.serve.replies import Reply
from penstock.settings import ServeConfig

TOKENIZER = ByteTokenizer()


def read(**fields: Any) -> AskedAnswers:
    model = ServedModel("m", 0, TOKENIZER, None, Limits(256, 64), (), {})
    return read_completion({"model": "m", "prompt": "a", **fields}, model, ServeConfig())


def test_no_answer_is_to_be_longer_than_it_may_be() -> None:
    assert read(max_tokens=2, min_tokens=60).params.min_new_tokens == 2
    assert read(max_tokens=60, min_tokens=2).params.min_new_tokens == 2


def test_each_part_of_a_streamed_reply_says_where_its_tokens_begin() -> None:
    reply = Reply(read(logprobs=0), "m", TokenTexts(TOKENIZER))
    growths = [Growth(0, Token(token), "", None) for token in "aéb".encode()]
    parts = [reply.part(0, growth) for growth in growths]
    offsets = [part["choices"][0]["logprobs"]["text_offset"] for part in parts if part is not None]
    assert offsets == [[0], [1], [1], [2]]

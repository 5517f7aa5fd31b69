"""Log-probabilities in replies: the names, bytes, places and values of tokens."""

import random
from dataclasses import replace

import pytest

from penstock.data.tokenizer import TokenTexts
from penstock.engine.generation.answers import AnswerText
from penstock.engine.generation.requests import TokenDelta
from penstock.schedule import Token
from penstock.serve.replies import ChoiceLogProbs, Reply
from tests.tokenizer_kinds import EMOJI, KINDS, make
from tests.unit.serve.test_asked import read

BROKEN = "\N{REPLACEMENT CHARACTER}"


def text_of(kind: str, tokens: list[int]) -> str:
    answer = AnswerText(make(kind))
    for token in tokens:
        answer.add(token)
    answer.finish()
    return answer.text


@pytest.mark.parametrize("kind", KINDS)
def test_each_token_stands_in_the_text_where_its_offset_says(kind: str) -> None:
    tokenizer = make(kind)
    texts, draw, num_found = TokenTexts(tokenizer), random.Random(1), 0
    samples = [" ".join(draw.choices(("so", "we", "say", EMOJI, f"{EMOJI}{EMOJI}x"), k=9)) for _ in range(40)]
    for tokens in (array.tolist() for array in tokenizer.encode(samples)):
        text = text_of(kind, tokens)
        described = ChoiceLogProbs(texts).of_completion([Token(one) for one in tokens], with_likeliest=False)
        first = True
        for one, offset in zip(tokens, described["text_offset"], strict=True):
            content = texts.bytes_of(one, first)
            first = first and content is None
            own = (content or b"").decode(errors="replace")
            # Bytes that are no whole character may end one that tokens before them began.
            if BROKEN not in own and not (tokenizer.entry(one) or "").startswith("<0x"):
                assert text[offset : offset + len(own)] == own, (text, own, offset)
                num_found += bool(own)
        assert described["text_offset"] == sorted(described["text_offset"])
    assert num_found > 100 or kind == "bytes"


@pytest.mark.parametrize("kind", ["byte-level", "byte-fallback", "bytes"])
def test_bytes_of_one_character_stand_where_it_begins(kind: str) -> None:
    tokenizer = make(kind)
    tokens = [one for one in tokenizer.encode([f"so{EMOJI}{EMOJI}x"])[0].tolist() if one not in tokenizer.end_tokens]
    described = ChoiceLogProbs(TokenTexts(tokenizer)).of_completion([Token(one) for one in tokens], False)
    assert described["text_offset"][-9:] == [2] * 4 + [3] * 4 + [4]
    assert described["tokens"][-9:-5] == [f"bytes:\\x{byte:02x}" for byte in EMOJI.encode()]


def test_names_join_to_the_text_and_all_alternatives_are_there() -> None:
    tokenizer = make("byte-fallback")
    tokens = tokenizer.encode(["so we say"])[0].tolist()
    by_entry = {tokenizer.entry(one): one for one in range(tokenizer.vocab_size)}
    both = [(by_entry[entry], -place) for place, entry in enumerate(("▁so", "so", "▁we", "we", "</s>"))]
    log_probs = ChoiceLogProbs(TokenTexts(tokenizer))
    described = log_probs.of_completion([Token(one, likeliest=tuple(both)) for one in tokens], with_likeliest=True)
    assert "".join(described["tokens"]) == "so we say"
    assert [list(one.values()) for one in described["top_logprobs"]] == [[-4, -3, -2, -1, 0]] * len(tokens)
    assert described["top_logprobs"][1] == {"so": -1, " so": 0, "we": -3, " we": -2, "</s>": -4}


def delta(token: int, likeliest: int) -> TokenDelta:
    """A token that is less likely than another, and was drawn at a temperature."""
    return TokenDelta(0, Token(token, -0.25, -2.5, ((likeliest, -0.5), (token, -2.5))), chr(token), None)


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_value_is_that_of_the_drawn_token_by_the_model_itself(is_chat: bool) -> None:
    asked = replace(read(logprobs=2), is_chat=is_chat)
    made = Reply(asked, "m", TokenTexts(make("bytes")))
    deltas = [delta(ord("a"), ord("b")), delta(ord("c"), ord("d"))]
    parts = [part["choices"][0]["logprobs"] for one in deltas if (part := made.part(0, one)) is not None]
    if not is_chat:
        assert [part["token_logprobs"] for part in parts] == [[-2.5], [-2.5]]
        assert [part["top_logprobs"] for part in parts] == [[{"a": -2.5, "b": -0.5}], [{"c": -2.5, "d": -0.5}]]
        return
    entries = [entry for part in parts for entry in part["content"]]
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in entries] == [
        ("a", -2.5, [ord("a")]),
        ("c", -2.5, [ord("c")]),
    ]
    assert [[(one["token"], one["logprob"]) for one in entry["top_logprobs"]] for entry in entries] == [
        [("b", -0.5), ("a", -2.5)],
        [("d", -0.5), ("c", -2.5)],
    ]

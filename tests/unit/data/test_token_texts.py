"""The texts and the bytes of single tokens, for each kind of tokenizer."""

import random

import pytest

from penstock.data.tokenizer import ByteTokenizer, Tokenizer, TokenTexts
from tests.tokenizer_kinds import EMOJI, KINDS, make

TEXTS = ["so we say", f"a {EMOJI} b\n\tü", "  two  spaces ", "x", f"{EMOJI}{EMOJI}", "\x01\x02 end"]


def joined(texts: TokenTexts, tokens: list[int]) -> bytes:
    found, first = b"", True
    for token in tokens:
        found += texts.bytes_of(token, first) or b""
        first = first and texts.bytes_of(token, first) is None
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_tokens_are_together_those_of_the_text(kind: str) -> None:
    tokenizer = make(kind)
    texts, draw, num_long = TokenTexts(tokenizer), random.Random(1), 0
    whole = [one for one in range(tokenizer.vocab_size) if "\ufffd" not in tokenizer.decode([one])]
    samples = [tokens.tolist() for tokens in tokenizer.encode(TEXTS)]
    samples += [draw.choices(whole, k=draw.randint(1, 12)) for _ in range(100)]
    for tokens in samples:
        text = tokenizer.decode(tokens)
        assert joined(texts, tokens) == text.encode(), [tokenizer.entry(one) for one in tokens]
        num_long += len(text) > 5
    assert num_long > 30


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [False, True])
def test_every_token_has_a_name_of_its_own(kind: str, first: bool) -> None:
    tokenizer = make(kind)
    texts, ids = TokenTexts(tokenizer), [*range(tokenizer.vocab_size), tokenizer.vocab_size + 7]
    names = texts.names(ids, first)
    assert list(names) == ids
    assert len(set(names.values())) == len(ids)


def test_parts_of_characters_and_special_tokens_are_named_as_openai_does() -> None:
    for kind in ("byte-level", "byte-fallback"):
        tokenizer = make(kind)
        texts = TokenTexts(tokenizer)
        *_, part = tokenizer.encode([f"x{EMOJI}"])[0].tolist()
        assert texts.names([part], first=False)[part] == f"bytes:\\x{EMOJI.encode()[-1]:02x}"
        special = next(one for one in range(tokenizer.vocab_size) if tokenizer.entry(one) == "</s>")
        assert texts.names([special], first=False) == {special: "</s>"}
        assert texts.bytes_of(special, first=False) is None
    assert TokenTexts(None).names([5], first=True) == {5: "<5>"}


def test_tokens_that_differ_by_a_space_differ_in_name_where_it_is_stripped_too() -> None:
    tokenizer = make("byte-fallback")
    texts, by_entry = TokenTexts(tokenizer), {tokenizer.entry(one): one for one in range(tokenizer.vocab_size)}
    spaced, plain = by_entry["▁we"], by_entry["we"]
    assert texts.names([plain, spaced], first=False) == {plain: "we", spaced: " we"}
    assert texts.names([spaced, plain], first=True) == {spaced: "we", plain: f"<{plain}>"}
    assert texts.names([plain, spaced], first=True) == {plain: "we", spaced: "▁we"}


def test_the_bytes_of_a_byte_tokenizer_are_its_tokens() -> None:
    tokenizer: Tokenizer = ByteTokenizer(end_token=True)
    texts = TokenTexts(tokenizer)
    assert [texts.bytes_of(one, first=False) for one in range(257)] == [*(bytes([one]) for one in range(256)), None]
    assert texts.names([256], first=False) == {256: "<|end|>"}

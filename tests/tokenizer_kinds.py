"""Small tokenizers of each kind of decoder."""

import tempfile
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.data.tokenizer import ByteTokenizer, Tokenizer, byte_level_alphabet, load_tokenizer

EMOJI = "\N{WATER WAVE}"
_SPECIAL = ["<unk>", "<s>", "</s>"]
_WORDS = ["s", "o", "so", "w", "e", "we", "say", "a", "x", "two"]
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def _bpe(entries: list[str], **settings: Any) -> models.BPE:
    return models.BPE(vocab={entry: place for place, entry in enumerate(entries)}, merges=[], **settings)


def _byte_level() -> tokenizers.Tokenizer:
    # The second of these holds a space and the beginning of a character; the third is U+FFFD itself.
    more = ["Ġwe", "Ġð", "ï¿½"]
    made = tokenizers.Tokenizer(_bpe([*_SPECIAL, *byte_level_alphabet(), "so", *more]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return made


def _byte_fallback(strips: bool) -> tokenizers.Tokenizer:
    """As those of Llama 2 and Mistral, whose decoders strip a space, or of Gemma, whose do not."""
    entries = [*_SPECIAL, *_BYTES, "▁", *_WORDS, *(f"▁{word}" for word in _WORDS), "▁▁", "ü", "\ufffd"]
    made = tokenizers.Tokenizer(_bpe(entries, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return made


def _metaspace() -> tokenizers.Tokenizer:
    entries = [*_SPECIAL, "▁", *_WORDS, *(f"▁{word}" for word in _WORDS), EMOJI]
    made = tokenizers.Tokenizer(models.Unigram([(entry, -1.0) for entry in entries], unk_id=0))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return made


def _word_piece() -> tokenizers.Tokenizer:
    entries = [*_SPECIAL, *_WORDS, *(f"##{word}" for word in _WORDS), ".", "'s", "n't"]
    vocabulary = {entry: place for place, entry in enumerate(entries)}
    made = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece(cleanup=True)
    return made


_MADE_BY = {
    "byte-level": _byte_level,
    "byte-fallback": lambda: _byte_fallback(strips=True),
    "byte-fallback-unstripped": lambda: _byte_fallback(strips=False),
    "metaspace": _metaspace,
    "word-piece": _word_piece,
}
KINDS = [*_MADE_BY, "bytes"]


@cache
def make(kind: str) -> Tokenizer:
    """A tokenizer of one of `KINDS`; <unk>, <s> and </s> are special in all but the one of bytes."""
    if kind == "bytes":
        return ByteTokenizer(end_token=True)
    made = _MADE_BY[kind]()
    made.add_special_tokens(_SPECIAL)
    with tempfile.TemporaryDirectory() as folder:
        made.save(f"{folder}/tokenizer.json")
        # It is read here, and not again.
        return load_tokenizer(folder)

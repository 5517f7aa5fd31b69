"""Pairs of texts, of which one is better: the examples that a reward model learns from.

Source: TRL 1.16, `RewardTrainer`, whose token ids these are.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.data.checks import CorpusError
from penstock.data.examples import Chat, ExampleReader, ended, messages_of, options_of
from penstock.data.sources import ROW_ENDINGS, Row, Source
from penstock.data.store import EncodedDocument

PAIR = '{"chosen": ..., "rejected": ...} with or without a "prompt", each a text or a list of messages'


@dataclass(frozen=True)
class PairReader:
    """Reads each row as two documents, the better text first; both begin with the row's prompt, if it has one.

    Learned of each is the token that is rated. Texts that are no messages end with the examples' end token.
    """

    #: tokenises and renders
    examples: ExampleReader
    #: the token that pads texts and is not rated
    pad_token: int | None
    marks_learned, documents_per_item = True, 2

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self.examples.vocab_size

    @property
    def fingerprint(self) -> str:
        """A hash that differs if any pair would be read differently."""
        text = f"{self.examples.fingerprint} {self.pad_token}"
        return f"pairs-{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"

    def read(self, source: Source) -> Iterator[list[EncodedDocument]]:
        """Yield the source's pairs.

        Raises: `CorpusError` naming file and line of what is no pair, and what would be possible.
        """
        if source.files[0].suffix not in ROW_ENDINGS:
            raise CorpusError(
                f"a reward model learns from pairs, but the corpus {source.name!r} has no rows; a line of data.corpus "
                f"is {PAIR}"
            )
        for row in source.rows():
            yield self.encode(row)

    def encode(self, row: Row) -> list[EncodedDocument]:
        """Tokenise a pair. Raises: as `read`."""
        where, pair = row.where, row.value
        if not isinstance(pair, dict):
            raise CorpusError(f"{where}: is a JSON {type(pair).__name__}; a line is {PAIR}")
        if lacking := [name for name in ("chosen", "rejected") if pair.get(name) is None]:
            raise CorpusError(f"{where}: has no {lacking[0]!r}, but a reward model learns from pairs; a line is {PAIR}")
        if pair.get("margin") is not None:
            raise CorpusError(
                f"{where}: has a 'margin', which the loss of penstock train does not know; leave it out, or begin with "
                "examples/reward_model.py, whose loss does"
            )
        parts = [part for name in ("prompt", "chosen", "rejected") if (part := pair.get(name)) is not None]
        if not any(all(isinstance(part, kind) for part in parts) for kind in (str, list)):
            these = "its 'chosen' and its 'rejected'" if len(parts) == 2 else "its prompt and both answers"
            raise CorpusError(f"{where}: {these} must all be texts, or lists of messages")
        # Both bear the row's name, so that validation holds back either both or none of them.
        return [self._document(row, pair, name) for name in ("chosen", "rejected")]

    def _document(self, row: Row, pair: Mapping[str, Any], name: str) -> EncodedDocument:
        tokens = self._tokens(row.where, pair, name)
        if not tokens:
            raise CorpusError(f"{row.where}: its {name!r} has no token to rate; give at least one character")
        self.examples.check_length(row.where, tokens)
        learned = np.zeros(len(tokens), np.bool_)
        learned[rated_place(tokens, self.pad_token)] = True
        return EncodedDocument(row.name, np.array(tokens, np.uint32), learned)

    def _tokens(self, where: str, pair: Mapping[str, Any], name: str) -> list[int]:
        prompt, answer = pair.get("prompt"), pair[name]
        if isinstance(answer, str):
            if not answer:
                raise CorpusError(f"{where}: its {name!r} is empty; give at least one character")
            return self.examples.tokenise(where, (prompt or "") + ended(answer, self.examples.end))
        messages = [*(messages_of(where, "prompt", pair) if prompt else []), *messages_of(where, name, pair)]
        if not any(value for key, value in messages[-1].items() if key != "role"):
            raise CorpusError(f"{where}: the last message of its {name!r} is empty; give at least one character")
        chat = Chat(self.examples, where, options_of(where, pair))
        return chat.tokenise(chat.render(messages))


def rated_place(tokens: Sequence[int], pad_token: int | None) -> int:
    """The place of the token by which transformers' classifiers rate a text: the last that is no padding."""
    return next((place for place in reversed(range(len(tokens))) if tokens[place] != pad_token), 0)

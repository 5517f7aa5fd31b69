"""The file that `penstock score` writes, and how the lines of several pipelines come to the process that writes it."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.launch import Group
from penstock.cli.texts import Text
from penstock.cli.unfinished import Unfinished
from penstock.runtime import PipelineError


@dataclass(frozen=True)
class Scored:
    """A line of the file: the scored tokens with their log-probabilities, and what these come to."""

    line: int
    id: Any
    tokens: Sequence[int]
    log_probs: Sequence[float | None]

    @classmethod
    def of(cls, text: Text, by_token: Sequence[float]) -> Self:
        """From the log-probability of each token's successor; the last one's says nothing."""
        first = len(text.tokens) - text.num_scored
        return cls(text.line, text.id, text.tokens[first:], [_plain(value) for value in by_token[first - 1 : -1]])

    def to_json(self) -> str:
        """One line of JSON; where nothing is scored there is no perplexity."""
        total = _total(self.log_probs)
        content = {
            "line": self.line,
            **({} if self.id is None else {"id": self.id}),
            "tokens": list(self.tokens),
            "log_probs": list(self.log_probs),
            "log_prob": total,
            "perplexity": _perplexity(total, len(self.tokens)),
        }
        return json.dumps(content, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True)
class Summary:
    """All lines together; `resumed_from` of them were there already, tokens a second are those of this call."""

    num_lines: int
    num_scored_tokens: int
    log_prob: float | None
    perplexity: float | None
    resumed_from: int
    time_s: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class ScoreFile:
    """The lines that are there so far; a call of the same `digest` goes on after them.

    `ends` are the numbers of lines at which batches end: what a killed call left of a batch is scored again.

    Raises: ValueError if the file can not be written, or another call is writing it.
    """

    def __init__(self, path: Path, digest: str, ends: Sequence[int]) -> None:
        self._unfinished = Unfinished(path, digest)
        self.num_lines = self._num_tokens = 0
        self._total: float | None = 0.0
        self._take_up(ends)

    def write(self, lines: Sequence[Scored]) -> None:
        """Append lines, through to the disk."""
        self._unfinished.append([scored.to_json() for scored in lines], to_disk=True)
        for scored in lines:
            self._count(scored.log_probs)

    def publish(self) -> None:
        """Give the file its name.

        Raises: ValueError if a file of that name has come into being meanwhile; what was written stays.
        """
        self._unfinished.publish()

    def summary(self, resumed_from: int, num_tokens: int, time_s: float) -> Summary:
        return Summary(
            num_lines=self.num_lines,
            num_scored_tokens=self._num_tokens,
            log_prob=self._total,
            perplexity=_perplexity(self._total, self._num_tokens),
            resumed_from=resumed_from,
            time_s=time_s,
            tokens_per_s=num_tokens / time_s,
        )

    def _take_up(self, ends: Sequence[int]) -> None:
        lines = self._unfinished.lines()
        kept = lines[: max((end for end in ends if end <= len(lines)), default=0)]
        for line in kept:
            self._count(json.loads(line)["log_probs"])
        self._unfinished.keep(kept)

    def _count(self, log_probs: Sequence[float | None]) -> None:
        total = _total(log_probs)
        self._total = None if total is None or self._total is None else self._total + total
        self._num_tokens += len(log_probs)
        self.num_lines += 1


def _plain(value: float) -> float | None:
    """As many digits as fp32 has, and None for infinity, which JSON does not have."""
    return float(f"{value:.8g}") if math.isfinite(value) else None


def _total(log_probs: Sequence[float | None]) -> float | None:
    known = [value for value in log_probs if value is not None]
    return round(math.fsum(known), 7) if len(known) == len(log_probs) else None


def _perplexity(total: float | None, num_tokens: int) -> float | None:
    if total is None or num_tokens == 0 or -total / num_tokens > 700:
        return None
    return float(f"{math.exp(-total / num_tokens):.8g}")


# A store takes values of up to 8 MiB.
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Pipelines:
    """This process's pipeline, number `index` of `count`; the processes of all of them meet at `store`."""

    index: int
    count: int
    store: Store
    timeout_s: float

    @classmethod
    def of(cls, store: Store, group: Group, count: int, timeout_s: float) -> "Pipelines":
        """Those of a group whose processes are shared out evenly, consecutive ones to one pipeline."""
        return cls(group.rank * count // group.world_size, count, store, timeout_s)

    def world(self, group: Group) -> tuple[Store, Group]:
        """This pipeline's own group, and its part of the store."""
        size = group.world_size // self.count
        own = replace(group, rank=group.rank - self.index * size, world_size=size)
        return PrefixStore(f"penstock/pipeline/{self.index}", self.store), own

    def takes(self, number: int) -> bool:
        """Whether this pipeline scores the batch of that number."""
        return number % self.count == self.index

    def hand_over(self, number: int, lines: Sequence[Scored]) -> None:
        """Give a batch's lines to the process that writes."""
        text = json.dumps([asdict(line) for line in lines])
        pieces = [text[start : start + _PIECE_BYTES] for start in range(0, len(text), _PIECE_BYTES)]
        for place, piece in enumerate(pieces):
            self.store.set(_key(number, place), piece)
        self.store.set(_key(number), str(len(pieces)))

    def receive(self, number: int) -> list[Scored]:
        """A batch's lines from the pipeline that has scored them.

        Raises: PipelineError if they do not come in time.
        """
        key = _key(number)
        try:
            self.store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            whose = number % self.count
            raise PipelineError(f"no scores of batch {number} from pipeline {whose} in {self.timeout_s:g} s") from error
        pieces = [_key(number, place) for place in range(int(self.store.get(key)))]
        text = "".join(self.store.get(piece).decode() for piece in pieces)
        for done in (key, *pieces):
            self.store.delete_key(done)
        return [Scored(**line) for line in json.loads(text)]


def _key(number: int, place: int | None = None) -> str:
    return f"penstock/scores/{number}" if place is None else f"penstock/scores/{number}/{place}"

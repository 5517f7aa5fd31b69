"""Several pipelines that score one file: each takes every so-manieth batch, and one process writes all in order.

Each is a world of its own: none waits for another's microbatches, and what it computes does not depend on how many
there are. Lines travel through the store where all processes have met.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.cli.launch import Group
from penstock.cli.score_file import Scored
from penstock.runtime import PipelineError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

# A store takes values of up to 8 MiB.
_PIECE_BYTES = 4 * 2**20


@dataclass(frozen=True)
class Pipelines:
    """This process's pipeline, number `index` of `count`; the processes of all of them meet at `store`."""

    index: int
    count: int
    store: "Store"
    timeout_s: float

    @classmethod
    def of(cls, store: "Store", group: Group, count: int, timeout_s: float) -> "Pipelines":
        """Those of a group whose processes are shared out evenly, consecutive ones to one pipeline."""
        return cls(group.rank * count // group.world_size, count, store, timeout_s)

    def world(self, group: Group) -> tuple["Store", Group]:
        """This pipeline's own group, and its part of the store."""
        from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

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

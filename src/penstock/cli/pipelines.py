"""Several pipelines that share the work of one command, each a group of its own, and hand results to one writer."""

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Self

from torch.distributed import PrefixStore, Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.group import Group
from penstock.runtime import PipelineError

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
    def of(cls, store: Store, group: Group, count: int, timeout_s: float) -> Self:
        """Divide the processes of a group evenly, consecutive ones to one pipeline."""
        return cls(group.rank * count // group.world_size, count, store, timeout_s)

    def world(self, group: Group) -> tuple[Store, Group]:
        """This pipeline's own group, and its part of the store."""
        size = group.world_size // self.count
        own = replace(group, rank=group.rank - self.index * size, world_size=size)
        return PrefixStore(f"penstock/pipeline/{self.index}", self.store), own

    def hand_over(self, name: str, value: Any) -> None:
        """Send a value of JSON, under a name of its own, to the process that writes."""
        text = json.dumps(value)
        pieces = [text[start : start + _PIECE_BYTES] for start in range(0, len(text), _PIECE_BYTES)]
        for place, piece in enumerate(pieces):
            self.store.set(_key(name, place), piece)
        self.store.set(_key(name), str(len(pieces)))

    def has(self, name: str) -> bool:
        """Return whether a value of that name has been handed over, and not received yet."""
        return self.store.check([_key(name)])

    def receive(self, name: str, what: str) -> Any:
        """Receive the value of that name; `what` describes it in messages.

        Raises: PipelineError if it does not come in time.
        """
        key = _key(name)
        try:
            self.store.wait([key], timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            raise PipelineError(f"no {what} in {self.timeout_s:g} s") from error
        pieces = [_key(name, place) for place in range(int(self.store.get(key)))]
        text = "".join(self.store.get(piece).decode() for piece in pieces)
        for done in (key, *pieces):
            self.store.delete_key(done)
        return json.loads(text)


def _key(name: str, place: int | None = None) -> str:
    return f"penstock/shared/{name}" if place is None else f"penstock/shared/{name}/{place}"

"""A place of its own for each start of a group, in a store that outlives them.

torchrun restarts all processes of a run when one has died, and its agents may keep one store for all those rounds: what
the processes of an earlier round have left there must not be taken for what those of this round say.
"""

import time
import uuid
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_PLACE = "penstock/rounds"
_POLL_S = 0.01
# How long rank 0 waits for one rank's word before it looks whether the rank it has greeted was of an earlier round.
_PATIENCE_S = 0.2


class Missing(ValueError):
    """Some processes of the group did not come in time."""


def agree_on_round(store: "Store", rank: int, world_size: int, timeout_s: float) -> "Store":
    """The part of a store that belongs to the processes that call this now, and to no earlier ones.

    Each process leaves a word that nobody has used before. Rank 0 answers every word it finds with the round's name,
    also those that were left by processes which are no more; only a process that lives thanks for it.

    Raises: Missing on rank 0, naming the ranks that did not come; TimeoutError on the others.
    """
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    deadline = time.monotonic() + timeout_s
    if rank == 0:
        name = uuid.uuid4().hex
        _greet_all(store, name, set(range(1, world_size)), deadline)
    else:
        word = uuid.uuid4().hex
        store.set(f"{_PLACE}/word/{rank}", word)
        if not _appears(store, f"{_PLACE}/answer/{word}", deadline):
            raise TimeoutError(f"rank {rank} was not answered by rank 0 within {timeout_s:g} s")
        name = store.get(f"{_PLACE}/answer/{word}").decode()
        store.set(f"{_PLACE}/{name}/thanks/{rank}", "")
    return PrefixStore(f"{_PLACE}/{name}", store)


def _greet_all(store: "Store", name: str, missing: set[int], deadline: float) -> None:
    while missing:
        for rank in sorted(missing):
            word = f"{_PLACE}/word/{rank}"
            if store.check([word]):
                store.set(f"{_PLACE}/answer/{store.get(word).decode()}", name)
                if _appears(store, f"{_PLACE}/{name}/thanks/{rank}", min(deadline, time.monotonic() + _PATIENCE_S)):
                    missing.discard(rank)
        if missing and time.monotonic() > deadline:
            raise Missing(f"rank(s) {', '.join(map(str, sorted(missing)))} of the run did not come in time")
        time.sleep(_POLL_S)


def _appears(store: "Store", key: str, deadline: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True

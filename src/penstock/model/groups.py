"""The ranks that share a model's layers, sequences and experts, as the model is given them."""

from dataclasses import dataclass
from typing import Protocol, cast

from torch.distributed import ProcessGroup

from penstock.model.attention.all_to_all import ContextForm


class Peers(Protocol):
    """What building a model must know of a group: its size, and this rank's place in it."""

    def size(self) -> int: ...

    def rank(self) -> int: ...


@dataclass(frozen=True)
class PlannedPeers:
    """A place in a group that does not exist (yet): enough to build a rank's modules and count their elements."""

    num_ranks: int
    place: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.place


@dataclass(frozen=True, eq=False)
class ModelGroups:
    """The groups a model's units talk in, each None where the rank would be alone in it.

    tp: ranks that share every layer. cp: ranks that share every sequence's tokens. ep: ranks that share every layer's
    experts. context_form: how the ranks of cp attend to each other's tokens.
    """

    tp: ProcessGroup | None = None
    cp: ProcessGroup | None = None
    ep: ProcessGroup | None = None
    context_form: ContextForm = ContextForm.RING

    @classmethod
    def planned(cls, *, tp: int = 1, cp: int = 1, ep: int = 1, form: ContextForm = ContextForm.RING) -> "ModelGroups":
        """First places in groups of these sizes that do not exist, to see what a rank would hold."""
        # Nothing is sent while modules are merely built, so a size and a place will do.
        peers = (None if size == 1 else cast(ProcessGroup, PlannedPeers(size)) for size in (tp, cp, ep))
        return cls(*peers, context_form=form)

    @property
    def tp_size(self) -> int:
        return _size(self.tp)

    @property
    def tp_rank(self) -> int:
        return _rank(self.tp)

    @property
    def cp_size(self) -> int:
        return _size(self.cp)

    @property
    def cp_rank(self) -> int:
        return _rank(self.cp)

    @property
    def ep_size(self) -> int:
        return _size(self.ep)

    @property
    def ep_rank(self) -> int:
        return _rank(self.ep)


def _size(peers: Peers | None) -> int:
    return 1 if peers is None else peers.size()


def _rank(peers: Peers | None) -> int:
    return 0 if peers is None else peers.rank()

"""The process groups over which a model's layers, sequences and experts are split."""

from dataclasses import dataclass
from typing import cast

from torch.distributed import ProcessGroup

from penstock.settings import ContextForm


@dataclass(frozen=True)
class PlannedGroup:
    """A place in a group that does not exist, enough to build a rank's modules and count their elements."""

    num_ranks: int
    place: int = 0

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return self.place


@dataclass(frozen=True, eq=False)
class ModelGroups:
    """The process groups in which a model's units communicate; a group is None if this rank would be alone in it."""

    #: tensor parallelism: its ranks split every layer
    tp: ProcessGroup | None = None
    #: context parallelism: its ranks split every sequence's tokens
    cp: ProcessGroup | None = None
    #: expert parallelism: its ranks split every layer's experts
    ep: ProcessGroup | None = None
    #: the form of attention between the ranks of cp
    context_form: ContextForm = ContextForm.RING

    @classmethod
    def planned(
        cls,
        *,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        form: ContextForm = ContextForm.RING,
        places: tuple[int, int, int] = (0, 0, 0),
    ) -> "ModelGroups":
        """Take places, the first by default, in groups that do not exist, to find out what a rank would hold."""
        # Building modules sends nothing, so a size and a place are enough.
        sizes = zip((tp, cp, ep), places, strict=True)
        return cls(
            *(None if size == 1 else cast(ProcessGroup, PlannedGroup(size, place)) for size, place in sizes),
            context_form=form,
        )

    @property
    def tp_size(self) -> int:
        return 1 if self.tp is None else self.tp.size()

    @property
    def tp_rank(self) -> int:
        return 0 if self.tp is None else self.tp.rank()

    @property
    def cp_size(self) -> int:
        return 1 if self.cp is None else self.cp.size()

    @property
    def cp_rank(self) -> int:
        return 0 if self.cp is None else self.cp.rank()

    @property
    def ep_size(self) -> int:
        return 1 if self.ep is None else self.ep.size()

    @property
    def ep_rank(self) -> int:
        return 0 if self.ep is None else self.ep.rank()

"""The groups of a layout as rows of text: which ranks talk to each other, and what about."""

import itertools

from penstock.settings import Groups, Layout

_SHOWN = 4


def group_table(layout: Layout) -> dict[str, Groups]:
    """The ranks of every kind of group that has more than one, by what they share."""
    kinds = {
        "pipelines (pp)": layout.groups("pp"),
        "sharing layers (tp)": layout.groups("tp"),
        "sharing sequences (cp)": layout.groups("cp"),
        "sharing experts (ep)": layout.expert_groups(),
        "summing gradients (dp x cp)": layout.groups("dp", "cp"),
        "summing experts' gradients": layout.expert_copies() if layout.ep > 1 else (),
    }
    alone = {name: tuple(ranks for ranks in groups if len(ranks) > 1) for name, groups in kinds.items()}
    return {name: groups for name, groups in alone.items() if groups}


def group_rows(layout: Layout) -> list[tuple[str, str]]:
    """Name and ranks of every kind; of many groups the first ones."""
    rows = []
    for name, groups in group_table(layout).items():
        shown = "   ".join(_ranks(ranks) for ranks in groups[:_SHOWN])
        more = f"   and {len(groups) - _SHOWN} more" if len(groups) > _SHOWN else ""
        rows.append((name, shown + more))
    return rows


def _ranks(ranks: tuple[int, ...]) -> str:
    """``0 1 2``, or for many in equal steps ``0 8 ... 56``."""
    if len(ranks) > 8 and len({later - earlier for earlier, later in itertools.pairwise(ranks)}) == 1:
        return f"{ranks[0]} {ranks[1]} ... {ranks[-1]}"
    return " ".join(map(str, ranks))

"""A rank's part of a batch whose sequences several ranks share."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate

import torch
from torch import Tensor

from penstock.data.checks import Lengths
from penstock.data.packed import PackedBatch

Pieces = Sequence[tuple[range, ...]]


def part_of(batch: PackedBatch, pieces: Pieces) -> PackedBatch:
    """The batch with only these positions of its sequences, given in the order of `sequence_lengths("tokens")`.

    Keys with a row per token are cut, and so are those with one row less a sequence, whose row t belongs to the step
    from token t to the next. Labels stand at the token before them already, so each part keeps those of its tokens.
    Other keys (a row per item, say) are whole in every part. A part may have sequences of length 0.
    """
    whole = batch.sequence_lengths("tokens")
    tables: dict[int, tuple[Lengths, Tensor]] = {}
    lengths, data = dict(batch.lengths), dict(batch.data or {})
    for key, table in batch.lengths.items():
        flat = batch.sequence_lengths(key)
        if len(flat) != len(whole) or (flat != whole and flat != tuple(n - 1 for n in whole)):
            continue
        if id(table) not in tables:
            held = [[range(r.start, min(r.stop, n)) for r in of] for of, n in zip(pieces, flat, strict=True)]
            tables[id(table)] = _cut_table(table, held), _rows(flat, held)
        lengths[key], rows = tables[id(table)]
        if batch.data is not None:
            data[key] = batch[key].index_select(0, rows.to(batch[key].device))
    kept = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return PackedBatch.trusted(**{**kept, "lengths": lengths, "data": None if batch.data is None else data})


def _cut_table(table: Lengths, held: Sequence[Sequence[range]]) -> Lengths:
    new = iter(sum(map(len, of)) for of in held)
    return tuple(tuple(next(new) for _ in item) for item in table)


def _rows(lengths: Sequence[int], held: Sequence[Sequence[range]]) -> Tensor:
    starts = accumulate(lengths[:-1], initial=0)
    rows = [torch.arange(s + r.start, s + r.stop) for s, of in zip(starts, held, strict=True) for r in of if r]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)

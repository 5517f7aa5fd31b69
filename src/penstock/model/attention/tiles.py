"""Attention over parts of the keys, to be merged.

A softmax over all keys is the mean of the softmaxes over parts of the keys, weighted by each part's sum of
exponentials. So `attend` returns a part's output and the logarithm of its sum, `merge_part` combines parts, and
`attend_backward` needs the sum over all keys alone. PyTorch's flash kernels compute them on CPUs in any precision and
on GPUs in 16 bit; elsewhere they are written out.

Shapes: N sequences of a run, L queries of each of them, S keys, H query heads, G key and value heads, K width of a
head, R = H / G.

Source: Dao 2023 (FlashAttention-2), sections 2.3 and 3.1, for parts and their gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import lru_cache

import torch
from torch import Tensor

from penstock.model.linear import dtype_of_sums


class Relation(Enum):
    """The keys of a tile that its queries see: all, those that do not come later, or those that a mask shows."""

    FULL = auto()
    CAUSAL = auto()
    MASKED = auto()


Positions = tuple[range, ...]


@dataclass(frozen=True)
class Tile:
    """Some rows of queries against some rows of keys, the same ones in each sequence of a run.

    Rows count from the sequence's first token on this rank; positions are those in the whole sequence.
    """

    queries: slice
    keys: slice
    relation: Relation
    query_positions: Positions
    key_positions: Positions
    #: the tokens that a query sees, its own included; None for all before it
    window: int | None = None

    def mask(self, device: torch.device) -> Tensor:
        """[L, S], true where the row's token sees the column's token."""
        # A device's memory is not for masks of other steps, and its host waits for no copy.
        make = _mask if device.type == "cpu" else _mask.__wrapped__
        return make(self.query_positions, self.key_positions, self.window, device)


@lru_cache(maxsize=256)
def _mask(queries: Positions, keys: Positions, window: int | None, device: torch.device) -> Tensor:
    q_L, k_S = (
        torch.cat([torch.arange(p.start, p.stop, device=device) for p in positions]) for positions in (queries, keys)
    )
    distance_LS = q_L[:, None] - k_S[None]
    seen_LS = distance_LS >= 0
    return seen_LS if window is None else seen_LS & (distance_LS < window)


def forget_masks() -> None:
    """Drop the masks that are kept: those made in a rehearsal have no values, and those made before it no cost."""
    _mask.cache_clear()


@lru_cache(maxsize=4096)
def tiles(queries: Positions, keys: Positions, window: int | None, apart: bool = False) -> tuple[Tile, ...]:
    """The tiles, as few as possible, in which queries at these positions see keys at those; both are ascending.

    With `apart` tiles are cut along the runs of positions, and those that are seen in part come first.
    """
    if not (queries and keys):
        return ()
    if not apart and queries == keys and not _narrows(window, _span(queries), _span(keys)):
        # Tokens are ascending, so an earlier row is an earlier position, whatever lies between them.
        return (Tile(_rows(queries), _rows(keys), Relation.CAUSAL, queries, keys, window),)
    found = [
        Tile(_rows(queries, i), _rows(keys, j), relation, (query,), (key,), window)
        for i, query in enumerate(queries)
        for j, key in enumerate(keys)
        if (relation := _relation(query, key, window)) is not None
    ]
    if apart:
        return tuple(sorted(found, key=lambda tile: tile.relation is Relation.FULL))
    # First tiles side by side are merged, then the results one below the other.
    return tuple(_merged(_merged(found)))


def _merged(found: Sequence[Tile]) -> list[Tile]:
    """The tiles in order, with one for each two full ones that lie side by side or one below the other."""
    merged: list[Tile] = []
    for tile in found:
        last = merged[-1] if merged else None
        if last is not None and last.relation is tile.relation is Relation.FULL:
            if last.queries == tile.queries and last.keys.stop == tile.keys.start:
                keys, positions = slice(last.keys.start, tile.keys.stop), last.key_positions + tile.key_positions
                merged[-1] = replace(last, keys=keys, key_positions=positions)
                continue
            if last.keys == tile.keys and last.queries.stop == tile.queries.start:
                rows, positions = (
                    slice(last.queries.start, tile.queries.stop),
                    last.query_positions + tile.query_positions,
                )
                merged[-1] = replace(last, queries=rows, query_positions=positions)
                continue
        merged.append(tile)
    return merged


def _relation(queries: range, keys: range, window: int | None) -> Relation | None:
    if not queries or not keys:
        return None
    nearest, farthest = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
    if farthest < 0 or (window is not None and nearest >= window):
        return None
    if nearest >= 0 and not _narrows(window, queries, keys):
        return Relation.FULL
    return Relation.CAUSAL if queries == keys and not _narrows(window, queries, keys) else Relation.MASKED


def _narrows(window: int | None, queries: range, keys: range) -> bool:
    """True if the window hides some key that causality does not."""
    return window is not None and queries.stop - 1 - keys.start >= window


def _span(positions: Positions) -> range:
    return range(positions[0].start, positions[-1].stop)


def _rows(positions: Positions, index: int | None = None) -> slice:
    if index is None:
        return slice(0, sum(map(len, positions)))
    start = sum(map(len, positions[:index]))
    return slice(start, start + len(positions[index]))


Three = tuple[Tensor, Tensor, Tensor]


def attend(q_NHLK: Tensor, k_NGSK: Tensor, v_NGSK: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Output [N, H, L, K] and, in at least fp32, log-sum-exp [N, H, L]; 0 and -inf for a row that sees nothing."""
    causal = tile.relation is Relation.CAUSAL
    if q_NHLK.device.type == "cpu":
        mask_LS = tile.mask(q_NHLK.device) if tile.relation is Relation.MASKED else None
        out, lse_NHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_NHLK, k_NGSK, v_NGSK, 0.0, causal, attn_mask=_additive(mask_LS, q_NHLK.dtype)
        )
        # This kernel returns 0 for the sum of nothing.
        return out, lse_NHL if mask_LS is None else lse_NHL.masked_fill(~mask_LS.any(1), -torch.inf)
    if not _has_flash(q_NHLK, tile):
        return attend_written_out(q_NHLK, k_NGSK, v_NGSK, tile)
    q, k, v = (x.transpose(1, 2) for x in (q_NHLK, k_NGSK, v_NGSK))
    longest = q.shape[1], k.shape[1]
    out, lse_NHL, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *longest, 0.0, causal, False)
    return out.transpose(1, 2), lse_NHL


def attend_backward(grad_NHLK: Tensor, qkv: Three, out_NHLK: Tensor, lse_NHL: Tensor, tile: Tile) -> Three:
    """A tile's addend to the gradients of q, k and v; output and log-sum-exp are those over all keys."""
    causal = tile.relation is Relation.CAUSAL
    if grad_NHLK.device.type == "cpu":
        mask_LS = tile.mask(grad_NHLK.device) if tile.relation is Relation.MASKED else None
        additive = _additive(mask_LS, grad_NHLK.dtype)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_NHLK, *qkv, out_NHLK, lse_NHL, 0.0, causal, attn_mask=additive
        )
    if not _has_flash(qkv[0], tile):
        return attend_backward_written_out(grad_NHLK, qkv, out_NHLK, lse_NHL, tile)
    grad, out, q, k, v = (x.transpose(1, 2).contiguous() for x in (grad_NHLK, out_NHLK, *qkv))
    longest, no_dropout = (q.shape[1], k.shape[1]), torch.empty(0, dtype=torch.uint64, device=q.device)
    grads = torch.ops.aten._flash_attention_backward(
        grad, q, k, v, out, lse_NHL.contiguous(), None, None, *longest, 0.0, causal, no_dropout, no_dropout
    )
    grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in grads)
    return grad_q, grad_k, grad_v


def attend_written_out(q_NHLK: Tensor, k_NGSK: Tensor, v_NGSK: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """`attend` in plain operations, for any device and precision; allocates [L, S] scores while it runs."""
    scores_NGRLS = _scores(q_NHLK, k_NGSK, tile)
    lse_NGRL = scores_NGRLS.logsumexp(-1)
    p_NGRLS = (scores_NGRLS - _finite(lse_NGRL)[..., None]).exp()
    out = (p_NGRLS @ _precise(v_NGSK)[:, :, None]).flatten(1, 2)
    return out.to(q_NHLK.dtype), lse_NGRL.flatten(1, 2)


def attend_backward_written_out(grad_NHLK: Tensor, qkv: Three, out_NHLK: Tensor, lse_NHL: Tensor, tile: Tile) -> Three:
    """`attend_backward` in plain operations."""
    q_NHLK, k_NGSK, v_NGSK = qkv
    heads = (k_NGSK.shape[1], -1)
    p = (_scores(q_NHLK, k_NGSK, tile) - lse_NHL.unflatten(1, heads)[..., None]).exp()
    grad, out, q = (_precise(x).unflatten(1, heads) for x in (grad_NHLK, out_NHLK, q_NHLK))
    k, v = (_precise(x)[:, :, None] for x in (k_NGSK, v_NGSK))
    pull = (grad * out).sum(-1, keepdim=True)
    grad_scores = p * (grad @ v.transpose(-1, -2) - pull) * q.shape[-1] ** -0.5
    grad_q = (grad_scores @ k).flatten(1, 2)
    return grad_q, (grad_scores.transpose(-1, -2) @ q).sum(2), (p.transpose(-1, -2) @ grad).sum(2)


def merge_part(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into the output [..., K] and log-sum-exp [...] of the others, in place and in at least fp32."""
    together = torch.logaddexp(lse, part_lse)
    floor = _finite(together)
    out.mul_((lse - floor).exp_()[..., None]).addcmul_(part.to(out.dtype), (part_lse - floor).exp_()[..., None])
    lse.copy_(together)


def _scores(q_NHLK: Tensor, k_NGSK: Tensor, tile: Tile) -> Tensor:
    """Scaled products [N, G, R, L, S] in at least fp32, -inf where a query does not see a key."""
    q_NGRLK = _precise(q_NHLK).unflatten(1, (k_NGSK.shape[1], -1))
    scores = q_NGRLK @ _precise(k_NGSK)[:, :, None].transpose(-1, -2) * q_NHLK.shape[-1] ** -0.5
    if tile.relation is Relation.FULL:
        return scores
    return scores.masked_fill(~tile.mask(scores.device), -torch.inf)


def _has_flash(x: Tensor, tile: Tile) -> bool:
    return tile.relation is not Relation.MASKED and x.dtype in (torch.float16, torch.bfloat16)


def _additive(mask_LS: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask_LS is None:
        return None
    return torch.zeros(mask_LS.shape, dtype=dtype, device=mask_LS.device).masked_fill_(~mask_LS, -torch.inf)[None, None]


def _finite(lse: Tensor) -> Tensor:
    """The log-sum-exp with 0 for rows that see nothing, because -inf minus -inf is not a number."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _precise(x: Tensor) -> Tensor:
    return x.to(dtype_of_sums(x))

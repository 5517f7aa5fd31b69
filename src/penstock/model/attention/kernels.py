"""Attention of some tokens over some others, with what is needed to put several such parts together.

A softmax over all keys is the mean of those over parts of the keys, weighted by the parts' sums of exponentials; so
each part gives its output and the logarithm of its sum. Its gradient needs the sum over all keys alone.

PyTorch's flash kernels compute it on CPUs in any precision, and on GPUs in 16 bit; elsewhere it is written out.

Shapes: N sequences, H query heads, G key and value heads, L queries, S keys, K width of a head, R = H / G.

Source: Dao 2023 (FlashAttention-2), sections 2.3 and 3.1, for parts and their gradients.
"""

import torch
from torch import Tensor

from penstock.model.attention.tiles import Relation, Tile

Three = tuple[Tensor, Tensor, Tensor]


def attend(q_NHLK: Tensor, k_NGSK: Tensor, v_NGSK: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """Output [N, H, L, K] and, in at least fp32, log-sum-exp [N, H, L]; of a row that sees nothing 0 and -inf."""
    causal = tile.relation is Relation.CAUSAL
    if q_NHLK.device.type == "cpu":
        mask_LS = tile.mask(q_NHLK.device) if tile.relation is Relation.MASKED else None
        out, lse_NHL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_NHLK, k_NGSK, v_NGSK, 0.0, causal, attn_mask=_additive(mask_LS, q_NHLK.dtype)
        )
        # Of the sum of nothing this kernel says 0.
        return out, lse_NHL if mask_LS is None else lse_NHL.masked_fill(~mask_LS.any(1), -torch.inf)
    if not _has_flash(q_NHLK, tile):
        return attend_written_out(q_NHLK, k_NGSK, v_NGSK, tile)
    q, k, v = (x.transpose(1, 2) for x in (q_NHLK, k_NGSK, v_NGSK))
    longest = q.shape[1], k.shape[1]
    out, lse_NHL, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *longest, 0.0, causal, False)
    return out.transpose(1, 2), lse_NHL


def attend_backward(grad_NHLK: Tensor, qkv: Three, out_NHLK: Tensor, lse_NHL: Tensor, tile: Tile) -> Three:
    """A tile's part of the gradients of q, k and v; output and log-sum-exp are those over all keys."""
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
    """`attend` in plain operations, for any device and precision; keeps [L, S] scores while it runs."""
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


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take a part into the output [..., K] and log-sum-exp [...] of the others, both in place and in at least fp32."""
    together = torch.logaddexp(lse, part_lse)
    floor = _finite(together)
    out.mul_((lse - floor).exp_()[..., None]).addcmul_(part.to(out.dtype), (part_lse - floor).exp_()[..., None])
    lse.copy_(together)


def _scores(q_NHLK: Tensor, k_NGSK: Tensor, tile: Tile) -> Tensor:
    """Scaled products [N, G, R, L, S] in at least fp32, -inf where nothing is seen."""
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
    """Of rows that see nothing, 0: what is subtracted from -inf must not be -inf too."""
    return lse.masked_fill(lse == -torch.inf, 0)


def _precise(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

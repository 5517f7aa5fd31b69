"""Small host-side values between ranks, as JSON: nothing received from a peer is ever unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Give every rank the list of all ranks' values, in the order of the group's ranks.

    `value` is anything JSON can hold; it comes back as JSON reads it (tuples as lists, keys as strings). `group`
    carries host memory (gloo); None stands for a rank that is alone.
    """
    text = json.dumps(value).encode()
    if group is None:
        return [json.loads(text)]
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(lengths, torch.tensor([len(text)]), group=group)
    # Equal lengths for all: gloo's gather knows no others.
    longest = max(int(length) for length in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    texts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(texts, own, group=group)
    return [json.loads(bytes(text[: int(length)].tolist())) for text, length in zip(texts, lengths, strict=True)]


def together(act: Callable[[], T], group: dist.ProcessGroup | None, *kinds: type[Exception]) -> T:
    """Act, and go on only if no rank's act has raised: what one can not do, none should go on from.

    Raises: what the act raised here; else, for the first other rank that raised, the same where it is one of `kinds`,
    a ValueError where it is one, and a RuntimeError for anything else.
    """
    error: Exception | None = None
    result: T | None = None
    try:
        result = act()
    except Exception as caught:
        error = caught
    known = (*kinds, ValueError, RuntimeError)
    kind = next((number for number, kind in enumerate(known) if isinstance(error, kind)), len(known) - 1)
    told = gather_json(None if error is None else [kind, str(error)], group)
    if error is not None:
        raise error
    for rank, failure in enumerate(told):
        if failure is not None:
            raise known[failure[0]](f"rank {rank}: {failure[1]}")
    return result  # pyright: ignore[reportReturnType]  # without an error the act has ended

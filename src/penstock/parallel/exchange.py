"""Small host-side values between ranks, as JSON: nothing received from a peer is ever unpickled."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist


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

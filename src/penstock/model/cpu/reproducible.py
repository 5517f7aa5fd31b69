"""Reproducible tokens: layers whose bits for a token depend on its sequence alone, and the check that they do.

Whatever else is computed with a token (other rows, a whole text, a part of one, in training or in generation), its
products have rows in oneDNN's one class, its keys come in fixed tiles (`fixed_tiles`), and all else is
computed by operations that give a value the same bits wherever it stands in a tensor. Which operations do so is a
property of libraries and CPUs, so it is tried with the model's own layers before anything is computed with them.

Shapes: T tokens, D hidden size.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import astuple

import torch
from torch import Tensor, nn

from penstock.model.cpu.fixed_tiles import TiledAttention, rounded_up
from penstock.model.cpu.gate import host_gate
from penstock.model.cpu.onednn import OneDnnMatmul
from penstock.model.kv_cache import CachedRows, CachedUnit, CacheSize
from penstock.model.layers.dense import AttentionBlock, Embedding, Head, MLPBlock
from penstock.model.linear import Linear, WeightCasts
from penstock.model.sequences import Sequences
from penstock.schedule import BatchItem
from penstock.settings.declare import type_in_words

LENGTHS = (163, 37, 1, 90)
"""Tokens of the sequences of the check: more than a tile of keys, more than a vector, one, and others."""

NUM_DECODED = 8
"""The last tokens of each of them, which are read one by one; those before are read in parts of random lengths."""


def make_reproducible(units: Iterable[tuple[str, nn.Module]], device: torch.device) -> None:
    """Have these units compute so that a token's bits depend on its sequence alone.

    Raises:
        ValueError: one cannot; the message names it.
    """
    if device.type not in ("cpu", "meta"):
        raise ValueError(f"reproducible = true: the device is {device.type}; possible is cpu")
    for name, module in units:
        if type(module) not in (Embedding, AttentionBlock, MLPBlock, Head):
            raise ValueError(
                f"reproducible = true: {name} is {type_in_words(module)}; possible are models of Penstock's own "
                "dense layers, on pipeline and data-parallel ranks alone"
            )
        if isinstance(module, AttentionBlock) and (window := module.attention.window) is not None:
            raise ValueError(
                f"reproducible = true: {name} sees the last {window} tokens alone (sliding_window); possible is "
                "attention to all tokens before"
            )
        if any(not isinstance(part.matmul, OneDnnMatmul) for part in module.modules() if isinstance(part, Linear)):
            raise ValueError("reproducible = true needs oneDNN's products, which this build of PyTorch lacks")
        if isinstance(module, AttentionBlock):
            module.attention = TiledAttention(*astuple(module.attention))
        elif isinstance(module, MLPBlock):
            module.kernel = host_gate(module.gate.out_features, is_reproducible=True)


@torch.no_grad()
def check_reproducible(units: Iterable[tuple[str, nn.Module]], hidden_size: int, casts: WeightCasts) -> None:
    """Try the first unit of each kind with random tokens: together, alone, and part by part as generation reads them.

    The units have `casts`, with which generation packs their weights.

    Raises:
        ValueError: a token gets other bits; the message says where.
    """
    tried: set[type] = set()
    for name, module in units:
        if isinstance(module, Embedding) or type(module) in tried:
            continue
        tried.add(type(module))
        generator = torch.Generator().manual_seed(0)
        # The head gives logits of single tokens alone, and many of them may be large.
        lengths = [min(length, NUM_DECODED) if isinstance(module, Head) else length for length in LENGTHS]
        texts = [torch.randn(length, hidden_size, generator=generator) for length in lengths]
        together = _forward(module, texts).split(lengths)
        # As in training; weights that are packed for good are never trained.
        trains = all(part.packed is None for part in module.modules() if isinstance(part, Linear))
        with torch.set_grad_enabled(trains):
            alone = [_forward(module, [text]).detach() for text in texts]
        with casts.kept():
            casts.pack(module, texts[0].dtype)
            read = _read(module, texts)
        for how, found in (("in a batch of its own", alone), ("in generation", read)):
            if not all(map(torch.equal, together, found)):
                raise ValueError(
                    f"reproducible = true is not possible on this machine: {name} gives a token other bits {how} "
                    f"(PyTorch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, "
                    f"{torch.get_num_threads()} threads); another number of threads may do"
                )


def _forward(module: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    return module(torch.cat(list(texts)), Sequences.from_lengths([len(text) for text in texts]))


def _read(module: nn.Module, texts: Sequence[Tensor]) -> list[Tensor]:
    """The texts read part by part, each batch having some of them."""
    assert isinstance(module, CachedUnit)
    size = CacheSize(len(texts), rounded_up(max(map(len, texts))), texts[0].dtype, texts[0].device)
    cache, chooser = module.new_cache(size), random.Random(0)
    found: list[list[Tensor]] = [[] for _ in texts]
    read = [0] * len(texts)
    while unread := [row for row, text in enumerate(texts) if read[row] < len(text)]:
        items = []
        for row in unread[chooser.randrange(len(unread)) :]:
            before_last = len(texts[row]) - NUM_DECODED - read[row]
            length = 1 if before_last < 1 else chooser.randint(1, before_last)
            items.append(BatchItem(row, row, read[row], length, sampled=True))
        items.sort(key=lambda item: item.length > 1)
        x_TD = torch.cat([texts[item.row][item.start : item.end] for item in items])
        outputs = module.decode(x_TD, cache, CachedRows.of(items)).split([item.length for item in items])
        for item, output in zip(items, outputs, strict=True):
            found[item.row].append(output)
            read[item.row] = item.end
    return [torch.cat(parts) for parts in found]

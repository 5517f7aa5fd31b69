"""Activations that move to host memory: what moves, what stays, and that the memory is free meanwhile."""

import os
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from penstock.model.cpu.host_memory import give_back_freed_memory
from penstock.runtime.offload import Arena, Saved, storages_of

pytestmark = pytest.mark.shows(210)
MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def deep(x: Tensor, layers: nn.ModuleList) -> Tensor:
    for layer in layers:
        x = torch.tanh(layer(x))
    return x


def test_the_resident_set_falls_by_what_is_away() -> None:
    torch.manual_seed(0)
    # Each output is 16 MiB.
    layers, arena = nn.ModuleList(nn.Linear(64, 64) for _ in range(8)), Arena()
    x = torch.randn(65536, 64, requires_grad=True)
    saved = Saved(arena, storages_of([layers]))
    with saved.noted(nullcontext()):
        loss = deep(x, layers).sum()
    give_back_freed_memory()
    before = resident_bytes()
    saved.offload()
    away = resident_bytes()
    assert before - away > 100 * MIB, f"{(before - away) / MIB:.0f} MiB"
    saved.reload()
    # The input is held here too, and was not freed: it comes back beside itself.
    assert resident_bytes() - away == pytest.approx(before - away + x.nbytes, rel=0.05)
    saved.offload()
    with pytest.raises(AssertionError, match="brings activations back before it reads them"):
        loss.backward()


def test_what_came_back_has_the_bits_that_went_and_views_share_one_block() -> None:
    torch.manual_seed(0)
    layer, arena = nn.Linear(64, 64), Arena()
    x = torch.randn(512, 64, requires_grad=True)

    def loss_of() -> Tensor:
        h = layer(x)
        # Two views of one tensor, one of them transposed.
        return (h[:256] * h[256:]).sum() + (h.t() @ h).square().sum()

    loss_of().backward()
    expected = [p.grad.clone() for p in (x, *layer.parameters()) if p.grad is not None]
    for _ in range(3):
        for tensor in (x, *layer.parameters()):
            tensor.grad = None
        saved = Saved(arena, storages_of([layer]))
        with saved.noted(nullcontext()):
            loss = loss_of()
        moved = sum(block.data.nbytes for block in saved.blocks if block.data is not None)
        # x, h and their product, each once; the parameters are not among them.
        assert moved == (2 * 512 * 64 + 64 * 64) * 4
        for _ in range(2):
            saved.offload()
            saved.reload()
        loss.backward()
        found = [p.grad for p in (x, *layer.parameters()) if p.grad is not None]
        assert len(found) == 3 and all(map(torch.equal, found, expected))
        # A place is given away again.
        assert arena._end == moved


def test_a_step_that_failed_leaves_no_place_behind() -> None:
    arena = Arena()
    arena.put(torch.zeros(100, dtype=torch.uint8))
    arena.clear()
    place = arena.put(torch.ones(100, dtype=torch.uint8))
    assert place.start == 0 and arena.take(place, torch.device("cpu")).sum() == 100


def test_what_is_no_plain_view_of_its_memory_stays() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.complex64, requires_grad=True)

    def loss_of() -> Tensor:
        sparse = torch.eye(64, dtype=torch.complex64).to_sparse()
        return (torch.sparse.mm(sparse, x.conj() @ x) * x.conj()).abs().sum()

    loss_of().backward()
    assert x.grad is not None
    expected, x.grad, saved = x.grad, None, Saved(Arena(), ())
    with saved.noted(nullcontext()):
        loss = loss_of()
    saved.offload()
    assert any(block.data is None for block in saved.blocks)
    saved.reload()
    loss.backward()
    assert x.grad is not None and torch.equal(x.grad, expected)

"""Weights that do not arrive: every rank says so in one sentence, and the receiver waits for whole ones."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock import Layout, PipelineError, SamplingParams, TransportError
from penstock.engine import Engine, EngineOptions, weight_transfer
from penstock.model import decoder_units
from penstock.runtime.transport import default_store
from tests.dist.grid_cases import DENSE
from tests.dist.launch import run_outcomes, run_ranks

PARAMS = SamplingParams(max_new_tokens=1)


def engines() -> tuple[Engine, Engine]:
    """One on the first rank that sends, and one on the second that receives."""
    found = []
    for rank in range(2):
        options = EngineOptions(timeout_s=60.0, learns=rank == 0, seed=rank)
        found.append(Engine(decoder_units(DENSE), DENSE.hidden_size, Layout(ranks=(rank,)), options))
    return found[0], found[1]


def sender_dies(rank: int) -> tuple[str, float, str]:
    """Die on the first rank after a few tensors; on the other, its error, how late it came, and what follows."""
    source, target = engines()
    source.send_weights(target)
    original, count = weight_transfer.WeightTransfer._move, 0

    def dying(*given: Any) -> None:
        nonlocal count
        count += 1
        if rank == 0 and count == 5:
            os._exit(7)
        original(*given)

    weight_transfer.WeightTransfer._move = dying  # pyright: ignore[reportAttributeAccessIssue]
    start = time.monotonic()
    with pytest.raises(TransportError) as lost:
        source.send_weights(target)
    late_s = time.monotonic() - start
    with pytest.raises(PipelineError) as refused:
        target.generate([[1]], PARAMS)
    return str(lost.value), late_s, str(refused.value)


def test_a_rank_that_dies_ends_the_transfer_at_once_and_half_of_the_weights_are_not_used() -> None:
    dead, alive = run_outcomes(2, sender_dies)
    assert dead.exit_code == 7 and alive.value is not None, alive.error
    lost, late_s, refused = alive.value
    assert "send weights to another engine" in lost and "a rank of [0, 1] has ended" in lost
    assert late_s < 30.0, "long before the time limit"
    assert refused == "weights did not arrive whole; send them again, or load a checkpoint"


def comes_late(rank: int) -> tuple[str, int, int]:
    """Call for weights that nobody sends yet, and again when they are sent; the error, the version, new tokens."""
    source, target = engines()
    error, store = "", default_store()
    if rank == 1:
        assert not source.weights_wait(target)
        patient = source.options
        for engine in (source, target):
            engine.options = replace(patient, timeout_s=1.0, learns=engine is source)
        with pytest.raises(TransportError) as late:
            source.send_weights(target)
        error = str(late.value)
        source.options = patient
        store.set("late", "")
    else:
        store.wait(["late"])
        source.pipeline.continue_from(3)
    return error, source.send_weights(target), target.generate([[1]], PARAMS).num_tokens if target.is_here else 0


def test_a_rank_that_does_not_come_is_named_and_may_come_later() -> None:
    (_, version, _), (error, arrived, num_tokens) = run_ranks(2, comes_late)
    assert "after 1 s rank 0 has not called send_weights" in error
    assert (version, arrived, num_tokens) == (3, 3, 1)


def test_an_engine_that_is_closed_cuts_its_ways_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[Any] = []
    monkeypatch.setattr(weight_transfer, "cut_backends", cut.append)
    settings = [EngineOptions(learns=learns) for learns in (True, False)]
    one, other = (Engine(decoder_units(DENSE), DENSE.hidden_size, options=options) for options in settings)
    one.send_weights(other)
    # Between ranks the way is a group of its own.
    one._transfers[other].group = SimpleNamespace(backends=lambda: "the way")  # pyright: ignore[reportAttributeAccessIssue]
    one.close()
    assert cut == ["the way"]
    other.close()

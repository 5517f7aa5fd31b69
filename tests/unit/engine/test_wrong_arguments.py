"""Wrong arguments: refused in one sentence before anything is computed, and the engine takes the next step."""

# pyright: reportArgumentType=false, reportCallIssue=false

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import (
    EarlyStop,
    Engine,
    EngineOptions,
    MicroBatchSpec,
    OptimizerConfig,
    PackedBatch,
    PerToken,
    SamplingParams,
    Trackers,
    read_config,
    schedule,
    token_cross_entropy,
    token_scores,
)
from penstock.engine.checkpoint import CheckpointError
from penstock.engine.rehearsal.step import rehearse_run
from penstock.model import decoder_units
from penstock.runtime import Executor, PipelineError
from penstock.settings import ModelConfig

CONFIG = ModelConfig(vocab_size=40, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, max_length=32)
BATCH = PackedBatch.from_documents([[1, 2, 3], [4, 5], [6, 7, 8]])
OTHER = schedule.build("1f1b", ranks=2, microbatches=2)


def layers() -> list[nn.Module]:
    return [nn.Embedding(40, 16), nn.Linear(16, 40)]


def made_of(*args: Any, **options: Any) -> Callable[[], Engine]:
    return lambda: Engine.from_layers(*args, **options)


CONSTRUCTORS: list[tuple[Callable[[], Any], str]] = [
    (made_of(None, 16), "layers = None: expected list[Module or partial]"),
    (made_of([nn.Embedding(4, 2), nn.Linear], 2), "layers[1]: expected Module or partial, got type"),
    (made_of(layers(), "16"), "hidden_size = '16': expected int, got str"),
    (made_of(layers(), 0), "hidden_size must be a whole number of at least 1, got 0"),
    (made_of(layers(), 16, "pp=2"), "layout = 'pp=2': expected Layout or None, got str"),
    (made_of(layers(), 16, None, {"seed": 1}), "options = {'seed': 1}: expected EngineOptions or None, got dict"),
    (made_of(layers(), 16, schedule=OTHER), "1f1b is for 2 ranks and 2 microbatches, not for 1"),
    (made_of(layers(), 16, optimizer=OptimizerConfig(scheduler=lambda optimizer: None)), "not a NoneType"),
    (lambda: EngineOptions(sead=1), "EngineOptions has no 'sead'; the nearest one is 'seed'"),
    (lambda: Engine(None, 16), "units = None: expected list[UnitSpec] or function"),
    (lambda: Engine(lambda groups: None, 16), "units = None: expected list[UnitSpec]"),
    (lambda: Engine.from_hf(None), "path = None: expected path or str"),
    (lambda: Engine.from_hf(""), "path = '' is empty; give a path"),
    (
        lambda: Engine.from_hf("nowhere", native="no"),
        'native = \'no\': expected bool or "auto"; the nearest one is "auto"',
    ),
    (lambda: Engine.from_config({}), "config = {}: expected RunConfig or str or path, got dict"),
    (lambda: read_config(5), "path = 5: expected str or path, got int"),
    (lambda: rehearse_run("run.toml", "0"), "rank = '0': expected int, got str"),
    (lambda: MicroBatchSpec(allow_fewer="yes"), "allow_fewer is 'yes'; it must be True or False"),
    (lambda: EarlyStop("x"), "patience = 'x': expected int, got str"),
    (lambda: Trackers(None), "trackers = None: expected list[Tracker]"),
    (lambda: token_scores(temperature="x"), "temperature = 'x': expected float, got str"),
    (lambda: PerToken(5), "hook = 5: expected function, got int"),
    (lambda: PackedBatch.from_sequences(5), "sequences: an int; give a dict from names to values"),
    (lambda: PackedBatch.from_documents(["ab"]), "sequences['tokens']: 'ab' is not a list of numbers"),
    (lambda: PackedBatch.gather("x"), "batches: a str; give a list of batches"),
    (lambda: BATCH.split_with(["x"]), "parts: 'x' is a str; give numbers of items, or ranges of them"),
    (lambda: BATCH.select(5), "keys: an int; give a list of names"),
    (lambda: BATCH.with_key(5, torch.ones(8)), "the key 5 is an int; keys are names"),
]


@pytest.mark.shows(113)
@pytest.mark.parametrize(("call", "words"), CONSTRUCTORS)
def test_what_cannot_be_made_says_which_argument_and_what_is_possible(call: Callable[[], Any], words: str) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert words in str(caught.value) and "\n" not in str(caught.value)


def calls(folder: Path) -> Iterator[tuple[Callable[[Engine], Any], str]]:
    """The call, and what its refusal says."""
    few, loss = SamplingParams(max_new_tokens=2), token_cross_entropy
    yield lambda e: e.train_batch(iter([BATCH])), "how many microbatches an iterator gives is known"
    yield (
        lambda e: e.train_batch(BATCH, lambda output: output),
        "loss_fn is a function of (output); give one of (output, ",
    )
    yield lambda e: e.train_batch(BATCH, loss, lambda: 1.0), "loss_weight_fn is a function of (); give one of (microb"
    yield lambda e: e.train_batch(BATCH, loss, lambda m: torch.ones(2)), "loss_weight_fn gave a Tensor for microbatch 0"
    yield lambda e: e.train_batch(BATCH, step=1 << 70), "steps are counted from 1 to 9223372036854775807"
    yield lambda e: e.train_batch(BATCH, los_fn=loss), "unexpected keyword argument 'los_fn'"
    yield lambda e: e.evaluate([None]), "batch: a NoneType; give a PackedBatch"
    yield lambda e: e.forward(BATCH, broadcast="yes"), "broadcast = 'yes': expected bool, got str"
    yield lambda e: e.forward(BATCH, output_seqlens=5), "output_seqlens = 5: expected list[int] or None, got int"
    yield lambda e: e.forward(BATCH, output_seqlens=[1.5, 1, 1]), "output_seqlens[0] = 1.5: expected int, got float"
    yield lambda e: e.forward(BATCH, lambda logits: logits), "post_hook is a function of (logits); give one of (logits,"
    yield lambda e: e.generate([[1]], few, on_token=lambda: 1), "on_token is a function of (); give one of (number, tok"
    yield lambda e: e.save(None), "path = None: expected str or path"
    yield lambda e: e.save(""), "path = '' is empty; give a path"
    yield lambda e: e.save(folder, keep="1"), "keep = '1': expected int, got str"
    yield lambda e: e.save(folder, keep=0), "at least 1 checkpoint must be kept, not 0"
    yield lambda e: e.save_hf(folder, shard=1), "ExportOptions has no 'shard'; the nearest one is 'max_shard_bytes'"
    yield (
        lambda e: e.gradient("head.norm.wieght"),
        "no gradient of 'head.norm.wieght'; the nearest name is 'head.norm.weight'",
    )


@pytest.mark.shows(113)
def test_what_a_method_cannot_use_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, device="cpu")
    before = {name: p.detach().clone() for name, p in engine.parameters().items()}

    def forbidden(*_: Any) -> Any:
        raise AssertionError("something was computed")

    with monkeypatch.context() as patch:
        patch.setattr(Executor, "run", forbidden)
        for call, words in calls(tmp_path / "run"):
            with pytest.raises((ValueError, TypeError)) as caught:
                call(engine)
            assert words in str(caught.value) and "\n" not in str(caught.value)
    assert all(torch.equal(p, before[name]) for name, p in engine.parameters().items())
    assert engine.train_batch(BATCH).step == 1 and engine.evaluate([BATCH]) > 0
    with pytest.raises(CheckpointError, match="cannot be written: not a directory; give another folder"):
        (tmp_path / "file").write_text("")
        engine.save(tmp_path / "file" / "run")
    engine.close()


def test_a_closed_engine_and_one_within_a_call_say_so(tmp_path: Path) -> None:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, device="cpu")

    def loss(output: Any, microbatch: PackedBatch) -> Any:
        engine.train_batch(BATCH)

    inside = "the engine was called while it is in 0F0; a loss, a hook, a listener or an iterator cannot"
    for call in (
        lambda: engine.train_batch(BATCH, loss),
        lambda: engine.forward(BATCH, lambda logits, microbatch: engine.forward(BATCH)),
    ):
        with pytest.raises(PipelineError, match=inside):
            call()
    assert engine.train_batch(BATCH).step == 1
    engine.close()
    for call in (
        lambda: engine.train_batch(BATCH),
        lambda: engine.evaluate([BATCH]),
        lambda: engine.forward(BATCH),
        lambda: engine.generate([[1]], SamplingParams(max_new_tokens=2)),
        lambda: engine.save(tmp_path),
        lambda: engine.load(tmp_path),
    ):
        with pytest.raises(PipelineError, match="this engine was closed; make another one"):
            call()
    engine.close()

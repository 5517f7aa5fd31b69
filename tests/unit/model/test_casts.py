"""Weights that are computed with in 16 bit are cast once a pass over many microbatches, and again after a step."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Engine, MicroBatchSpec, PackedBatch
from penstock.engine import EngineOptions
from penstock.model import WeightCasts, decoder_units
from penstock.settings import ModelConfig, Precision

CONFIG = ModelConfig(vocab_size=40, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=4)
SPEC = MicroBatchSpec(num=4)


class Casts(TorchDispatchMode):
    """Counts, by name, how often a weight is copied into 16 bit."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in engine.parameters().items() if p.dim() == 2}
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        source = args[0] if args else None
        if isinstance(result, Tensor) and result.dtype is torch.bfloat16 and isinstance(source, Tensor):
            name = self.names.get(source.data_ptr())
            if name is not None and source.dtype is torch.float32 and source.shape == result.shape:
                self.counts[name] += 1
        return result


def make(precision: Precision = Precision.BF16_AUTOCAST) -> Engine:
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=EngineOptions(precision=precision, device="cpu"))


def batch(seed: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_documents([torch.randint(0, 40, (n,), generator=generator) for n in (5, 9, 3, 7, 6)])


def forwards(engine: Engine) -> Tensor:
    return engine.forward(batch(1), micro_batches=SPEC)


def validation(engine: Engine) -> Tensor:
    return torch.tensor(engine.evaluate([batch(1), batch(2), batch(3)], micro_batches=SPEC))


def several(engine: Engine) -> Tensor:
    with engine.fixed_weights():
        return torch.cat([forwards(engine), forwards(engine)])


@pytest.mark.shows(60)
@pytest.mark.parametrize("run", [forwards, validation, several])
def test_a_pass_casts_each_weight_once_whatever_the_number_of_microbatches(
    run: Callable[[Engine], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    results = []
    for _ in range(2):
        with Casts(engine) as casts:
            results.append(run(engine))
        # The embedding is looked up, not multiplied by.
        assert casts.counts == dict.fromkeys((name for name in casts.names.values() if "embedding" not in name), 1)
        engine.train_batch(batch(4), micro_batches=SPEC)
    assert not torch.equal(*results), "a step in between is seen"
    monkeypatch.setattr(WeightCasts, "of", lambda casts, weight, dtype: weight.to(dtype))
    plain = make()
    assert torch.equal(run(plain), results[0]), "keeping casts changes no bit"


def test_a_step_inside_a_pass_is_seen_by_what_follows_it() -> None:
    engine, plain = make(), make()
    with engine.fixed_weights():
        forwards(engine)
        engine.train_batch(batch(4), micro_batches=SPEC)
        inside = forwards(engine)
    plain.train_batch(batch(4), micro_batches=SPEC)
    assert torch.equal(inside, forwards(plain))


def test_nothing_is_cast_where_weights_have_the_dtype_already() -> None:
    engine = make(Precision.FP32)
    with Casts(engine) as casts:
        forwards(engine)
    assert casts.names and not casts.counts

"""Weights packed while generating: the same bits, the weights as they are now, and nothing kept behind."""

import gc

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine.generation.answers import GenerateOptions
from penstock.model import CachedRows, CacheSize, Linear, WeightCasts, decoder_units, share_casts
from penstock.model.linear import fastest_matmul, outputs
from penstock.schedule import BatchItem
from penstock.settings import ModelConfig, Precision

# As in `tests.generation`, widths are multiples of the vectors' length.
CONFIG = ModelConfig(64, 32, 64, 2, 4, num_kv_heads=2, qkv_bias=True, max_length=64)
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5]]
PARAMS = SamplingParams(max_new_tokens=6, temperature=1.2, raw_log_probs=True)


def make() -> Engine:
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size)


def batch(seed: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_documents([torch.randint(0, 64, (n,), generator=generator) for n in (5, 9, 3)])


def answers(engine: Engine, packed: bool = True) -> list[object]:
    found = engine.generate(PROMPTS, PARAMS, GenerateOptions(packed=packed))
    return [(answer.tokens, answer.log_probs, answer.raw_log_probs) for answer in found]


def num_packed(casts: WeightCasts) -> int:
    return sum(packed is not None for packed in casts._packed.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17, 64])
def test_one_packed_product_of_several_layers_has_the_bits_of_each_ones_own(
    num_rows: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layers = [Linear(1408, size, bias, fastest_matmul()).to(dtype) for size in (96, 32, 32)]
    casts = WeightCasts()
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        if bias:
            torch.nn.init.normal_(layer.bias)
        share_casts(layer, casts)
    x = torch.randn(num_rows, 1408, dtype=dtype)
    with torch.inference_mode():
        expected = [layer(x) for layer in layers]
        with casts.kept(packed=True):
            joint, alone = outputs(x, layers), [layer(x) for layer in layers]
        for of_all, own, plain, layer in zip(joint, alone, expected, layers, strict=True):
            assert torch.equal(of_all, plain) and torch.equal(own, plain)
            assert torch.equal(layer(x[:1]), plain[:1]), "a row is computed as it is among others"


@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_answers_have_the_same_bits_packed_or_not(precision: Precision) -> None:
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=EngineOptions(precision=precision))
    assert answers(engine, packed=True) == answers(engine, packed=False)


def test_a_step_between_two_generations_is_seen_also_where_both_are_one_pass() -> None:
    engine, plain = make(), make()
    found, expected = [answers(engine)], [answers(plain, packed=False)]
    with engine.fixed_weights():
        found.append(answers(engine))
        # Each layer has one for q, k and v, output, gate and up, and down; the head one.
        assert num_packed(engine.pipeline.casts) in (0, 4 * CONFIG.num_layers + 1)
        engine.train_batch(batch(1), micro_batches=MicroBatchSpec(num=1))
        found.append(answers(engine))
    assert num_packed(engine.pipeline.casts) == 0, "the pass has given the memory back"
    expected.append(answers(plain, packed=False))
    plain.train_batch(batch(1), micro_batches=MicroBatchSpec(num=1))
    expected.append(answers(plain, packed=False))
    assert found == expected
    assert found[1] != found[2]


def test_packed_weights_are_gone_with_the_generation_that_packed_them() -> None:
    """Not when Python next looks for cycles: their memory is what the next generation packs into."""
    engine = make()
    gc.collect()
    gc.disable()
    try:
        answers(engine)
        left = [one for one in gc.get_objects() if isinstance(one, Tensor) and one.is_mkldnn]
    finally:
        gc.enable()
    assert not left


@pytest.mark.parametrize("part", ["norm", "q", "v", "output", "gate", "down", "projection"])
def test_a_hook_sees_and_changes_what_a_token_is_computed_from(part: str) -> None:
    engine, seen = make(), []
    [*layers] = (module for _, module in engine.pipeline.stages[0].units if hasattr(module, part))

    def doubled(module: nn.Module, given: object, output: Tensor) -> Tensor:
        seen.append(len(output))
        return 2 * output

    before = answers(engine)
    hooks = [getattr(layer, part).register_forward_hook(doubled) for layer in layers]
    found = answers(engine)
    assert found == answers(engine, packed=False) != before and len(PROMPTS) in seen
    for hook in hooks:
        hook.remove()
    assert answers(engine) == before


def test_nothing_but_generation_packs() -> None:
    engine = make()
    with engine.fixed_weights():
        engine.forward(batch(1))
        engine.train_batch(batch(2), micro_batches=MicroBatchSpec(num=1))
        assert num_packed(engine.pipeline.casts) == 0


def test_a_stage_packs_beforehand_all_that_its_units_read_packed() -> None:
    engine = make()
    stage, rows = engine.pipeline.stages[0], CachedRows.of([BatchItem(0, 0, start=0, length=3, sampled=True)])
    caches = stage.new_caches(CacheSize(1, 8, torch.float32, torch.device("cpu")))
    with torch.inference_mode(), engine.pipeline.casts.kept(packed=True):
        stage.pack_weights()
        beforehand = dict(engine.pipeline.casts._packed)
        stage.decode(torch.tensor([5, 9, 2]), caches, rows)
        assert engine.pipeline.casts._packed.keys() == beforehand.keys()
    assert len(beforehand) == 4 * CONFIG.num_layers + 1

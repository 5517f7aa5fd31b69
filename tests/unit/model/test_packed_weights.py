"""Weights packed while generating: the same bits, the weights as they are now, and nothing kept behind."""

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, EngineOptions, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import token_scores
from penstock.engine.generation.options import GenerateOptions
from penstock.model import Linear, WeightCasts, decoder_units, share_casts
from penstock.model.cpu.onednn import fastest_matmul
from penstock.model.layers import dense
from penstock.model.linear import PackedWeights, outputs
from penstock.runtime import Decoders
from penstock.settings import ModelConfig, Precision, Quantize

# As in `tests.generation`, widths are multiples of the vectors' length.
CONFIG = ModelConfig(64, 32, 64, 2, 4, num_kv_heads=2, qkv_bias=True, max_length=64)
PROMPTS = [[5, 9, 2], [7], [1, 2, 3, 4, 5]]
PARAMS = SamplingParams(max_new_tokens=6, temperature=1.2, raw_log_probs=True)


def make() -> Engine:
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size)


def batch(seed: int) -> PackedBatch:
    generator = torch.Generator().manual_seed(seed)
    return PackedBatch.from_documents([torch.randint(0, 64, (n,), generator=generator) for n in (5, 9, 3)])


def answers(engine: Engine, packed: bool = True) -> list[tuple[Any, ...]]:
    found = engine.generate(PROMPTS, PARAMS, GenerateOptions(packed=packed))
    return [(answer.tokens, answer.log_probs, answer.raw_log_probs) for answer in found]


def layers_with(engine: Engine, part: str) -> list[Any]:
    return [module for _, module in engine.pipeline.model.stages[0].units if hasattr(module, part)]


def num_packed(casts: WeightCasts) -> int:
    return len({layer.packed for layer in casts._packed})


class Joint(nn.ModuleList):
    """Layers that read the same input."""

    @property
    def joint_layers(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(map(str, range(len(self)))),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 17, 64])
def test_one_packed_product_of_several_layers_has_the_bits_of_each_ones_own(
    num_rows: int, bias: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layers = tuple(Linear(1408, size, bias, fastest_matmul()).to(dtype) for size in (96, 32, 32))
    casts = WeightCasts()
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        if bias:
            torch.nn.init.normal_(layer.bias)
        share_casts(layer, casts)
    x = torch.randn(num_rows, 1408, dtype=dtype)
    with torch.inference_mode():
        expected = [layer(x) for layer in layers]
        with casts.kept():
            casts.pack(Joint(layers), dtype)
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
        assert num_packed(engine.pipeline.model.casts) == 0, "the generation has given the memory back"
        engine.train_batch(batch(1), micro_batches=MicroBatchSpec(num=1))
        found.append(answers(engine))
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


@pytest.mark.parametrize("part", ["norm", "v", "gate", "projection"])
def test_a_hook_sees_and_changes_what_a_token_is_computed_from(part: str) -> None:
    engine, seen = make(), []
    layers = layers_with(engine, part)

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


class Twice(Linear):
    """A layer that computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def by_class(layer: nn.Module, part: str) -> None:
    getattr(layer, part).__class__ = Twice


def by_instance(layer: nn.Module, part: str) -> None:
    own = getattr(layer, part)
    before = own.forward
    own.forward = lambda x: 2 * before(x)


def by_another(layer: nn.Module, part: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    setattr(layer, part, Wrapped(getattr(layer, part)))


@pytest.mark.parametrize("change", [by_class, by_instance, by_another])
@pytest.mark.parametrize("part", ["q", "output", "up", "projection"])
def test_a_layer_that_computes_something_else_is_called(part: str, change: Callable[[nn.Module, str], None]) -> None:
    engine = make()
    for layer in layers_with(engine, part):
        change(layer, part)
    found = answers(engine)
    assert found == answers(engine, packed=False) != answers(make())
    tokens = [*PROMPTS[0], *found[0][0]]
    given = PackedBatch.from_sequences({"tokens": [tokens], "labels": [[-100, -100, *found[0][0], -100]]})
    scores = engine.forward(given, token_scores())["log_probs"][2:-1]
    torch.testing.assert_close(torch.tensor(found[0][2]), scores, rtol=1e-5, atol=1e-5)


def test_a_change_of_a_norm_or_of_one_bias_counts() -> None:
    engine, before = make(), answers(make())
    for layer in layers_with(engine, "norm"):
        layer.norm.eps = 0.5
    after = answers(engine)
    assert after == answers(engine, packed=False) != before
    for layer in layers_with(engine, "gate"):
        layer.gate.bias = nn.Parameter(torch.ones(CONFIG.intermediate_size))
    assert answers(engine) == answers(engine, packed=False) != after


@pytest.mark.parametrize("options", [{}, {"precision": Precision.BF16}, {"quantize": Quantize.INT8, "learns": False}])
def test_the_last_layer_computes_only_tokens_whose_logits_are_wanted(options: dict[str, Any]) -> None:
    rows: list[int] = []

    def noted(gate: Tensor, *given: Any) -> Tensor:
        rows.append(len(gate))
        return dense.gated(gate, *given)

    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=EngineOptions(device="cpu", **options))
    for mlp in layers_with(engine, "down"):
        mlp.kernel = replace(mlp.kernel, gated_rows=noted)
    prompts = [[1, 2, 3, 4, 5] * 8, [6] * 30, [7]]
    # Prompts are cut: most of what is read ends without a token that is wanted.
    plan = GenerateOptions(prefill_tokens=16)
    sparing = [(answer.tokens, answer.log_probs) for answer in engine.generate(prompts, PARAMS, plan)]
    first, last = rows[::2], rows[1::2]
    assert sum(first) == sum(map(len, prompts)) + 3 * (PARAMS.max_new_tokens - 1)
    (*_, mlp), seen = layers_with(engine, "down"), []
    # Where a row's bits depend on the other rows, as in bf16 without instructions for it, all are computed.
    assert mlp.down.has_apart_rows or "precision" in options
    assert sum(last) == (3 * PARAMS.max_new_tokens if mlp.down.has_apart_rows else sum(first))
    rows.clear()
    # Who watches the last layer sees every token, and the answers are the same.
    mlp.down.register_forward_hook(lambda module, given, output: seen.append(len(output)))
    watched = [(answer.tokens, answer.log_probs) for answer in engine.generate(prompts, PARAMS, plan)]
    assert watched == sparing
    assert sum(seen) == sum(rows[::2]) == sum(rows[1::2])
    engine.close()


@pytest.mark.parametrize("width", [40, 44, 48])
def test_any_inner_width_has_the_same_bits_packed_or_not_and_alone(width: int) -> None:
    config = replace(CONFIG, intermediate_size=width)
    engine = Engine(decoder_units(config), CONFIG.hidden_size)
    greedy = SamplingParams(max_new_tokens=6, temperature=0, raw_log_probs=True)

    def found(prompts: list[list[int]], packed: bool) -> list[object]:
        return [
            (one.tokens, one.raw_log_probs) for one in engine.generate(prompts, greedy, GenerateOptions(packed=packed))
        ]

    alone = [found([prompt], True)[0] for prompt in PROMPTS]
    assert found(PROMPTS, True) == found(PROMPTS, False) == alone


def test_texts_with_one_key_head_have_their_own_bits_with_two_threads() -> None:
    config = ModelConfig(96, 64, 128, 2, 1, num_kv_heads=1, head_dim=64, max_length=160)
    engine, greedy = Engine(decoder_units(config), 64), SamplingParams(12, temperature=0, raw_log_probs=True)
    prompts = torch.randint(96, (9, 9), generator=torch.Generator().manual_seed(0)).tolist()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        together = [one.raw_log_probs for one in engine.generate(prompts, greedy)]
        assert together == [engine.generate([prompt], greedy)[0].raw_log_probs for prompt in prompts]
    finally:
        torch.set_num_threads(threads)


def test_nothing_but_generation_packs() -> None:
    engine = make()
    with engine.fixed_weights():
        engine.forward(batch(1))
        engine.train_batch(batch(2), micro_batches=MicroBatchSpec(num=1))
        assert num_packed(engine.pipeline.model.casts) == 0


def test_on_a_gpu_nothing_is_looked_at_for_packing() -> None:
    # The weights are joined before a kernel says whether it packs them.
    decoders = Decoders([object()], torch.bfloat16, torch.device("cuda"), captures=True)  # type: ignore[list-item]
    decoders.pack_weights(WeightCasts())


def test_a_stage_packs_the_weights_of_layers_that_read_one_input_together() -> None:
    engine = make()
    stage, casts = engine.pipeline.model.stages[0], engine.pipeline.model.casts
    with torch.inference_mode(), casts.kept():
        stage.pack_weights(casts)
        # Each layer has one for q, k and v, output, gate and up, and down; the head one.
        is_packed = fastest_matmul().packed(torch.ones(8, 8), None) is not None
        assert num_packed(casts) == (4 * CONFIG.num_layers + 1) * is_packed
    assert num_packed(casts) == 0


def test_a_single_row_is_computed_twice_where_alone_it_would_be_computed_otherwise() -> None:
    for takes_one_row in (True, False):
        packed = PackedWeights(lambda x: x * x.shape[:-1].numel(), 0, takes_one_row)
        for shape in ((4,), (1, 4), (1, 1, 4)):
            assert torch.equal(packed.output(torch.ones(shape)), torch.ones(shape) * (1 if takes_one_row else 2))
        assert torch.equal(packed.output(torch.ones(3, 4)), torch.full((3, 4), 3.0))

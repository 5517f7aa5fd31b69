"""Units: their names, sizes and initial values; packing, recompute and precision of the whole decoder."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock.model import Linear, Sequences, UnitSpec, cross_entropy_sum, decoder_units, recomputed
from penstock.model.layers.grouped_linear import GroupedLinear
from penstock.model.linear import Matmul
from penstock.settings import ExpertConfig, ModelConfig

BASE = ModelConfig(41, 24, 40, 2, 4, num_kv_heads=2)
VARIANTS = {
    "plain": BASE,
    "tied": replace(BASE, tie_embeddings=True),
    "qwen2": replace(BASE, qkv_bias=True),
    "qwen3": replace(BASE, qk_norm=True, head_dim=10),
    "window": replace(BASE, sliding_window=3),
}
LENGTHS = (6, 6, 1, 9)


def build(units: tuple[UnitSpec, ...], seed: int = 0) -> nn.ModuleList:
    modules = nn.ModuleList(unit.build() for unit in units)
    for unit, module in zip(units, modules, strict=True):
        unit.initialise(module, seed)
    return modules


def full_names(units: tuple[UnitSpec, ...], modules: nn.ModuleList) -> dict[str, Tensor]:
    return {unit.full_name(name): p for unit, module in zip(units, modules) for name, p in module.named_parameters()}


def run(modules: nn.ModuleList, tokens: Tensor, lengths: tuple[int, ...], recompute: bool = False) -> Tensor:
    sequences, x = Sequences.from_lengths(lengths), tokens
    for module in modules:
        x = recomputed(module, x, sequences) if recompute else module(x, sequences)
    return x


def tokens_of(lengths: tuple[int, ...]) -> Tensor:
    return torch.randint(BASE.vocabulary, (sum(lengths),), generator=torch.Generator().manual_seed(5))


def test_every_layer_computes_its_products_as_the_model_is_told_to() -> None:
    own = Matmul()
    experts = ExpertConfig(4, 2, 20, shared_size=12, shared_gate=True, num_dense_first=1)
    for config in (*VARIANTS.values(), replace(BASE, experts=experts, num_predictions=1)):
        layers = list(build(decoder_units(config, own)).modules())
        assert sum(isinstance(layer, Linear) for layer in layers) >= 15
        assert all(layer.matmul is own for layer in layers if isinstance(layer, Linear))
        assert all(layer.matmul.matmul is own for layer in layers if isinstance(layer, GroupedLinear))


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
class TestEveryVariant:
    def test_units_are_named_in_order_and_count_their_parameters(self, config: ModelConfig) -> None:
        units = decoder_units(config)
        halves = [f"layers.{i}.{half}" for i in range(2) for half in ("attention", "mlp")]
        assert [unit.name for unit in units] == ["embedding", *halves, "head"]
        for unit in units:
            assert unit.num_parameters == sum(p.numel() for p in unit.build().parameters()) > 0
            assert unit.flops_per_token > 0

    @pytest.mark.shows(29)
    def test_recompute_gives_the_same_bits(self, config: ModelConfig) -> None:
        tokens, results = tokens_of(LENGTHS), []
        for recompute in (False, True):
            units = decoder_units(config)
            modules = build(units)
            loss = cross_entropy_sum(run(modules, tokens, LENGTHS, recompute), tokens.roll(-1))
            loss.backward()
            results.append([loss, *(p.grad for p in modules.parameters())])
        assert len(results[0]) > 10
        assert all(torch.equal(plain, again) for plain, again in zip(*results, strict=True))


class TestInitialValues:
    @pytest.mark.shows(90)
    def test_depend_on_neither_order_nor_neighbours_nor_the_random_state(self) -> None:
        units = decoder_units(BASE)
        expected = full_names(units, build(units))
        torch.manual_seed(99)
        for unit in reversed(units):
            module = unit.build()
            torch.rand(3)
            unit.initialise(module, 0)
            for name, p in module.named_parameters():
                assert torch.equal(p, expected.pop(unit.full_name(name)))
        assert not expected

    def test_do_not_depend_on_how_many_layers_follow_but_for_the_residual_scale(self) -> None:
        shallow, deep = decoder_units(BASE), decoder_units(replace(BASE, num_layers=8))
        few, many = full_names(shallow, build(shallow)), full_names(deep, build(deep))
        for name, p in few.items():
            scaled = "output" in name or "down" in name
            torch.testing.assert_close(many[name] * (2.0 if scaled else 1.0), p, rtol=1e-6, atol=0)

    def test_meta_modules_become_real_with_the_same_values(self) -> None:
        for unit in decoder_units(replace(BASE, qkv_bias=True)):
            with torch.device("meta"):
                late = unit.build()
            assert all(p.is_meta for p in late.parameters())
            unit.initialise(late, 3)
            real = unit.build()
            unit.initialise(real, 3)
            for (name, p), q in zip(late.named_parameters(), real.parameters(), strict=True):
                assert torch.equal(p, q), name

    def test_are_written_in_place_and_rounded_to_the_dtype(self) -> None:
        unit = decoder_units(BASE)[1]
        module, rounded = unit.build(), unit.build().to(torch.bfloat16)
        addresses = [p.data_ptr() for p in rounded.parameters()]
        unit.initialise(module, 0)
        unit.initialise(rounded, 0)
        assert [p.data_ptr() for p in rounded.parameters()] == addresses
        assert all(torch.equal(p.bfloat16(), q) for p, q in zip(module.parameters(), rounded.parameters(), strict=True))

    def test_every_parameter_and_every_seed_has_values_of_its_own(self) -> None:
        units = decoder_units(replace(BASE, num_layers=3))
        drawn = [
            p.flatten()[:6].tolist()
            for seed in (0, 1)
            for p in full_names(units, build(units, seed)).values()
            if p.dim() == 2
        ]
        assert len(drawn) == 2 * (2 + 3 * 7)
        assert all(a != b for a, b in itertools.combinations(drawn, 2))

    def test_a_tied_head_is_another_parameter_with_its_owners_values(self) -> None:
        units = decoder_units(replace(BASE, tie_embeddings=True))
        assert units[-1].tied == {"projection.weight": "embedding.weight"}
        assert not any(unit.tied for unit in units[:-1])
        parameters = full_names(units, build(units))
        owner, copy = parameters["embedding.weight"], parameters["head.projection.weight"]
        assert copy is not owner
        assert copy.data_ptr() != owner.data_ptr()
        assert torch.equal(copy, owner)


class TestWork:
    def test_every_part_of_the_work_is_counted_at_its_width(self) -> None:
        experts = ExpertConfig(num_experts=8, num_active=2, intermediate_size=20, shared_size=12)
        config = replace(BASE, max_length=64, qk_norm=True, sliding_window=16, num_predictions=1)
        vocab, hidden, inner, queries, keys, seen = 41, 24, 40, 24, 12, 16 * (1 - 16 / (2 * 64))
        rotated = queries + keys
        attention = 4 * hidden * rotated + 24 * seen * queries + 200 * (hidden + rotated) + 120 * rotated + 35 * hidden
        head = vocab * (2 * hidden + 240) + 200 * hidden
        dense, width = (6 * hidden + 200) * inner + 235 * hidden, 2 * 20 + 12
        sparse = (6 * hidden + 200) * width + 2 * hidden * 8 + 80 * 2 * hidden + 235 * hidden
        for mlp, settings in ((dense, {}), (sparse, {"experts": experts})):
            found = {unit.name: unit.flops_per_token for unit in decoder_units(replace(config, **settings))}
            ahead = 4 * hidden**2 + 400 * hidden + attention + mlp + head
            layers = {
                f"layers.{n}.{kind}": work for n in range(2) for kind, work in (("attention", attention), ("mlp", mlp))
            }
            ends = {"embedding": hidden * (40 + 130 * vocab / 64), "head": head + ahead}
            assert found == pytest.approx(layers | ends)


class TestConfig:
    def test_what_is_left_out_follows(self) -> None:
        config = ModelConfig(41, 24, 40, 2, 4)
        assert (config.key_heads, config.head_size) == (4, 6)


@pytest.mark.shows(29)
def test_dropout_of_a_foreign_unit_is_replayed_by_recompute() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
            return self.dropout(x * x)

    x, sequences = torch.linspace(1, 2, 64)[:, None].requires_grad_(), Sequences.from_lengths((64,))
    y = recomputed(Noisy(), x, sequences)
    torch.rand(7)
    (grad,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(grad, 2 * y.detach() / x.detach())
    assert 0 < (grad == 0).sum() < 64

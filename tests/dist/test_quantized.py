"""Quantized models over real processes: the same tokens in any layout, and hardly another perplexity once trained."""

import math
import sysconfig
import tomllib
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.folders.model_folder import open_model
from penstock.engine.generation.options import GenerateOptions
from penstock.model import decoder_units
from penstock.model.cpu.onednn import fastest_matmul
from penstock.model.cpu.quantized import SHAPES, int_mm
from penstock.model.hf.families import HuggingFaceForm
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig, ParallelConfig, Precision, Quantize
from tests.covering import EVERY
from tests.dist.launch import run_ranks
from tests.generation import random_prompts

CONFIG = ModelConfig(97, 64, 128, 2, 4, num_kv_heads=2, qkv_bias=True, max_length=96)
KINDS = [
    ("fp32", "none"),
    ("bf16", "none"),
    ("fp32", "int8"),
    ("bf16", "int8"),
    ("fp32", "int8-weights"),
    ("bf16", "int8-weights"),
    ("fp32", "int4"),
    ("bf16", "int4"),
]
PARAMS = [
    SamplingParams(max_new_tokens=length, temperature=1.1, seed=length, raw_log_probs=True)
    for length in (9, 5, 7, 9, 3, 8)
]
OPTIONS = (
    GenerateOptions(),
    GenerateOptions(num_slots=3, rows_per_slot=1),
    GenerateOptions(rows_per_slot=2, longest_first=False),
    GenerateOptions(rows_per_slot=1, refill=False, packed=False),
)


def packs(precision: str, quantize: str) -> bool:
    """True where weights are packed; in bf16 that is for the processor to say."""
    weight = torch.ones(8, 8, dtype={"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    return quantize != "none" or fastest_matmul().packed(weight, None) is not None


def answers(
    rank: int, layout: Layout, kinds: list[tuple[str, str]], ways: tuple[GenerateOptions, ...]
) -> dict[tuple[str, str], list[Any]]:
    """Tokens and log-probabilities of every kind of product, with each of the options."""
    found: dict[tuple[str, str], list[Any]] = {}
    for precision, quantize in kinds:
        options = EngineOptions(
            precision=Precision(precision), quantize=Quantize(quantize), learns=False, read_only=True, timeout_s=60
        )
        engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, layout, options)
        assert any("attention.q.weight" in name for name in engine.parameters()) != packs(precision, quantize), (
            "packed weights are all there is"
        )
        found[precision, quantize] = [
            [
                (answer.tokens, answer.log_probs, answer.raw_log_probs)
                for answer in engine.generate(random_prompts(), PARAMS, way)
            ]
            for way in ways
        ]
        stem, cut = list(range(40)), GenerateOptions(prefill_tokens=16)
        prompts = [[*stem, number, 3] for number in range(3)] + [stem]
        shared = engine.generate(prompts, PARAMS[:1] * 4, cut)
        alone = [engine.generate([prompt], PARAMS[:1], cut)[0] for prompt in prompts]
        for together, own in zip(shared, alone, strict=True):
            assert (together.tokens, together.log_probs) == (own.tokens, own.log_probs), "prompts that begin alike"
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(132, 133)
def test_tokens_of_every_kind_of_product_have_the_same_bits_in_any_pipeline_slot_and_batch() -> None:
    [alone] = run_ranks(1, answers, Layout(), KINDS, OPTIONS)
    # One process shows that no option changes a bit, so that two of them show it of two stages.
    both = run_ranks(2, answers, Layout(pp=2), KINDS, OPTIONS if EVERY else OPTIONS[:2])
    assert len({str(found[0]) for found in alone.values()}) == len(KINDS), "the kinds differ, so they are used"
    for kind, found in alone.items():
        for number, way in enumerate(found):
            assert way == found[0], f"{kind}, option {number}"
        assert [rank[kind] for rank in both] == [found[: len(both[0][kind])]] * 2, kind
    for shared in run_ranks(2, answers, Layout(tp=2), KINDS[:1], OPTIONS[:1]):
        for (tokens, *numbers), (wanted, *wanted_numbers) in zip(shared[KINDS[0]][0], alone[KINDS[0]][0], strict=True):
            assert tokens == wanted
            for row, wanted_row in zip(numbers, wanted_numbers, strict=True):
                assert row == pytest.approx(wanted_row, abs=1e-6, rel=0)


def chosen(rank: int, layout: Layout, kinds: tuple[str, ...]) -> list[tuple[str, list[str]]]:
    """The kind that each engine has settled on, and the kernels that it has packed weights for."""
    found = []
    seconds = ({"fp32": 5.0, "int8 by a": 1.0, "int8 by b": 2.0}, {"fp32": 1.5, "int8 by a": 9.0, "int8 by b": 2.0})
    own = {name: [took_s, 0.0] for name, took_s in seconds[rank].items()}
    for kind in kinds:
        packed: list[str] = []

        def kernel(weight_OI: torch.Tensor, scales_O: torch.Tensor, name: str, packed: list[str] = packed) -> Any:
            packed.append(name)
            return int_mm(weight_OI, scales_O)

        kernels = {name: partial(kernel, name=name) for name in "ab"}
        options = EngineOptions(quantize=Quantize(kind), learns=False, timeout_s=60)
        with (
            patch("penstock.engine.quantization.measured_seconds", lambda *_: [own] * len(SHAPES)),
            patch("penstock.model.cpu.quantized.INT8_KERNELS", kernels),
        ):
            engine = Engine(lambda groups: decoder_units(CONFIG, groups=groups), CONFIG.hidden_size, layout, options)
        found.append((str(engine.pipeline.options.quantize), sorted(set(packed))))
        engine.close()
        engine.grid.close()
    return found


@pytest.mark.shows(175)
def test_all_ranks_take_the_kernel_and_the_numbers_that_are_fastest_for_all_of_them() -> None:
    # The first rank alone would take a; for the second alone auto would be none.
    for found in run_ranks(2, chosen, Layout(pp=2), ("int8", "auto")):
        assert found == [("int8", ["b"]), ("int8", ["b"])]


DEMO = ModelConfig(vocab_size=256, **tomllib.loads(Path("examples/tiny.toml").read_text())["model"])


def texts(names: tuple[str, ...], length: int) -> list[torch.Tensor]:
    """The bytes of files of Python's library, in pieces of equal length."""
    folder = Path(sysconfig.get_path("stdlib"))
    whole = torch.frombuffer(bytearray(b"".join((folder / name).read_bytes() for name in names)), dtype=torch.uint8)
    return list(whole[: len(whole) // length * length].long().split(length))


@pytest.mark.shows(131)
def test_the_perplexity_of_a_trained_model_is_within_one_percent_in_int8(tmp_path: Path) -> None:
    optimizer = OptimizerConfig(LearningRate(2e-3))
    engine = Engine(
        *(decoder_units(DEMO), DEMO.hidden_size, Layout(), EngineOptions(optimizer=optimizer)), HuggingFaceForm.of(DEMO)
    )
    learned, spec = texts(("argparse.py", "inspect.py", "typing.py", "subprocess.py"), 64), MicroBatchSpec(num=1)
    for step in range(50):
        batch = [learned[(7 * step + 31 * i) % len(learned)] for i in range(4)]
        engine.train_batch(PackedBatch.from_documents(batch), micro_batches=spec)
    engine.save_hf(tmp_path / "model")
    engine.close()
    held_out = [PackedBatch.from_documents(texts(("textwrap.py",), 64)[:32])]
    found = {}
    kinds = [kind for kind in Quantize if kind is not Quantize.AUTO]
    for kind in kinds:
        model = open_model(tmp_path / "model", quantize=kind)
        engine = Engine(*model.arguments(ParallelConfig()))
        found[kind] = math.exp(engine.evaluate(held_out))
        engine.close()
    assert found[Quantize.NONE] < 30, "it has learned"
    assert found[Quantize.INT8] == pytest.approx(found[Quantize.NONE], rel=0.01)
    assert found[Quantize.INT8_WEIGHTS] == pytest.approx(found[Quantize.NONE], rel=0.01)
    assert found[Quantize.INT4] == pytest.approx(found[Quantize.NONE], rel=0.1)
    assert len(set(found.values())) == len(found)


def test_an_engine_that_has_packed_its_weights_refuses_to_write_them(tmp_path: Path) -> None:
    options = EngineOptions(quantize=Quantize.INT8, learns=False)
    engine = Engine(decoder_units(CONFIG), CONFIG.hidden_size, Layout(), options)
    with pytest.raises(ValueError, match="packed for good; make one without read_only and quantize"):
        engine.state()
    engine.close()
    with pytest.raises(ValueError, match="leaves no weights to train; give learns=False"):
        EngineOptions(quantize=Quantize.INT8)

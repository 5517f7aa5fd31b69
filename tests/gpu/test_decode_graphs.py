"""Decoding by captured graphs draws the tokens of eager decoding, and gives its memory back."""

from dataclasses import replace

import pytest
import torch

from penstock import Engine, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.generation.options import GenerateOptions
from penstock.model import decoder_units
from penstock.runtime import DecodeLoop, FixedDecoder
from penstock.settings import ModelConfig, Precision

# Heads of 64 and vectors of 16 bytes, as the kernels want them.
CONFIG = ModelConfig(256, 256, 512, 3, 4, num_kv_heads=2, max_length=512)
GREEDY = SamplingParams(max_new_tokens=40, temperature=0)
SAMPLED = SamplingParams(max_new_tokens=40, temperature=1.2, top_k=50, top_p=0.95)


def make(precision: Precision = Precision.FP32) -> Engine:
    options = EngineOptions(precision=precision, device="cuda")
    return Engine(decoder_units(CONFIG), CONFIG.hidden_size, options=options)


def random_prompts(lengths: tuple[int, ...] = (7, 1, 40, 40, 4, 2)) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(CONFIG.vocabulary, (length,), generator=generator).tolist() for length in lengths]


def params(kind: SamplingParams, count: int) -> list[SamplingParams]:
    return [replace(kind, seed=i, num_samples=1 + i % 3, max_new_tokens=3 + 12 * (i % 4)) for i in range(count)]


def decoders(engine: Engine) -> list[FixedDecoder]:
    every = (decoder for decoders in engine.generator.decoders.by_form.values() for decoder in decoders)
    return [decoder for decoder in every if isinstance(decoder, FixedDecoder)]


@pytest.mark.gpu
@pytest.mark.shows(72)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("kind", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_of_graphs_are_those_of_the_same_computation_run_eagerly(
    kind: SamplingParams, precision: Precision
) -> None:
    engine, prompts = make(precision), random_prompts()
    for options in (GenerateOptions(), GenerateOptions(num_slots=2, rows_per_slot=3, prefill_tokens=16)):
        own = params(kind, len(prompts))
        eager = engine.generate(prompts, own, replace(options, decode="all-rows"))
        captured = engine.generate(prompts, own, replace(options, decode="graphs"))
        assert [answer.tokens for answer in captured] == [answer.tokens for answer in eager]
        assert [answer.log_probs for answer in captured] == [answer.log_probs for answer in eager]
    assert any(decoder.captures and decoder.num_shapes for decoder in decoders(engine))


@pytest.mark.gpu
@pytest.mark.shows(72)
@pytest.mark.shows(207)
@pytest.mark.parametrize(("precision", "num_graphs"), [(Precision.FP32, 4), (Precision.BF16, 2)])
def test_one_graph_a_slot_and_shape_captured_once_and_at_the_beginning(
    precision: Precision, num_graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, graph, run = [], torch.cuda.graph, DecodeLoop.run
    before_loops: list[int] = []

    def counted(*args: object, **settings: object) -> object:
        captured.append(args)
        return graph(*args, **settings)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(torch.cuda, "graph", counted)
    monkeypatch.setattr(DecodeLoop, "run", lambda loop: (before_loops.append(len(captured)), run(loop)))
    engine, options = make(precision), GenerateOptions(num_slots=2, rows_per_slot=2, decode="graphs")
    prompts = random_prompts((4, 3, 50, 5))
    # In fp32 each slot may look at 64 tokens, or at 128; in 16 bit a kernel looks at as many as there are.
    first = engine.generate(prompts, GREEDY, options)
    assert len(captured) == num_graphs == sum(decoder.num_shapes for decoder in decoders(engine))
    again = engine.generate(prompts, GREEDY, options)
    assert before_loops == [num_graphs] * 2 and len(captured) == num_graphs
    assert [answer.tokens for answer in again] == [answer.tokens for answer in first]
    # Other rows in a slot are another shape.
    engine.generate(prompts, GREEDY, replace(options, rows_per_slot=1))
    assert before_loops[-1] == len(captured) > num_graphs


@pytest.mark.gpu
@pytest.mark.shows(72)
def test_memory_is_released_on_demand_and_generation_goes_on() -> None:
    engine, prompts, options = make(), random_prompts(), GenerateOptions(decode="graphs")
    tokens, released = [], []
    for _ in range(3):
        tokens.append([answer.tokens for answer in engine.generate(prompts, GREEDY, options)])
        held = decoders(engine)
        assert held and all(decoder.captures and decoder.num_shapes for decoder in held)
        while_held = torch.cuda.memory_allocated()
        engine.release_caches()
        assert decoders(engine) == [] and all(decoder.num_shapes == 0 for decoder in held)
        released.append(torch.cuda.memory_allocated())
        assert released[-1] < while_held
    # After the first time, when libraries have set up what they keep, everything comes back.
    assert released[1] == released[2]
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.gpu
@pytest.mark.shows(72)
def test_graphs_read_the_weights_that_training_has_changed_in_place() -> None:
    captured, eager = make(Precision.BF16), make(Precision.BF16)
    batch = PackedBatch.from_documents([torch.randint(0, 256, (n,), generator=torch.manual_seed(0)) for n in (9, 12)])
    prompts, found = random_prompts(), []
    for _ in range(3):
        found.append(captured.generate(prompts, SAMPLED, GenerateOptions(decode="graphs")))
        expected = eager.generate(prompts, SAMPLED, GenerateOptions(decode="all-rows"))
        assert [answer.tokens for answer in found[-1]] == [answer.tokens for answer in expected]
        for engine in (captured, eager):
            engine.train_batch(batch, micro_batches=MicroBatchSpec(num=1))
    assert len({tuple(answer.tokens for answer in result) for result in found}) > 1


@pytest.mark.gpu
def test_under_autocast_nothing_is_captured_and_the_tokens_are_the_same() -> None:
    engine, prompts = make(Precision.BF16_AUTOCAST), random_prompts()
    eager = engine.generate(prompts, GREEDY, GenerateOptions(decode="all-rows"))
    found = engine.generate(prompts, GREEDY, GenerateOptions(decode="graphs"))
    assert [answer.tokens for answer in found] == [answer.tokens for answer in eager]
    assert not any(decoder.captures for decoder in decoders(engine))

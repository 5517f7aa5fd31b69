"""Weights sent between engines of one world arrive bit for bit, whatever the two layouts, in little memory."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Layout, MicroBatchSpec, PackedBatch, PipelineError, SamplingParams
from penstock.engine import Engine, EngineOptions, weight_transfer
from penstock.model import decoder_units
from penstock.parallel.grid import world_ranks
from penstock.parallel.tensor_slice import TensorSlice
from penstock.settings import LearningRate, ModelConfig, OptimizerConfig, Precision, ScheduleConfig
from tests.dist.grid_cases import DENSE, SPARSE, VOCABULARY
from tests.dist.launch import run_ranks
from tests.hugging_face import make_model

TIED = replace(DENSE, tie_embeddings=True)
FIRST, LAST, ALL = range(2), range(2, 4), range(4)
WIDE = ModelConfig(vocab_size=640, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4)


@dataclass(frozen=True)
class Side:
    """An engine of a pair: where it lies, and how it runs."""

    layout: Layout
    schedule: str = "1f1b"
    stages: int = 1
    zero: bool = False


@dataclass(frozen=True)
class Model:
    """A model, the engines that learn it, and those that each of them sends to."""

    sources: tuple[Side, ...]
    targets: tuple[Side, ...]
    config: ModelConfig = DENSE
    precision: Precision = Precision.FP32

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return [(i, j) for i in range(len(self.sources)) for j in range(len(self.targets))]


MODELS = [
    Model(
        (
            Side(Layout(pp=2, ranks=FIRST), "interleaved", 2),
            Side(Layout(tp=2, ranks=LAST)),
            Side(Layout(dp=2, ranks=FIRST), zero=True),
            Side(Layout(pp=2, ranks=LAST), "dualpipe", 2),
        ),
        (
            Side(Layout(tp=2, ranks=LAST)),
            Side(Layout(pp=2, ranks=FIRST), "zb-v", 2),
            Side(Layout(ranks=(3,))),
            Side(Layout(pp=2, tp=2)),
            # Holds tied weights twice on a rank.
            Side(Layout(pp=2, ranks=LAST), "dualpipe", 2),
        ),
        TIED,
    ),
    Model(
        (Side(Layout(dp=2, ep=2, ranks=FIRST), zero=True), Side(Layout(pp=2, dp=2, ranks=ALL), zero=True)),
        (Side(Layout(pp=2, ranks=(1, 3)), "dualpipe", 2), Side(Layout(dp=2, ep=2, ranks=LAST))),
        SPARSE,
        Precision.BF16,
    ),
]
Held = list[tuple[str, TensorSlice, Tensor]]


def engine_of(side: Side, model: Model, learns: bool, seed: int) -> Engine:
    options = EngineOptions(
        ScheduleConfig(side.schedule, side.stages),
        precision=model.precision,
        optimizer=OptimizerConfig(LearningRate(1e-2), zero=side.zero),
        timeout_s=60.0,
        learns=learns,
        seed=seed,
    )
    config = model.config
    return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, side.layout, options)


def pair_of(source: Layout, target: Layout, model: Model | None = None) -> tuple[Engine, Engine]:
    """An engine that learns and one that it can send to, with other weights each."""
    model = model or Model((), ())
    return engine_of(Side(source), model, True, 1), engine_of(Side(target), model, False, 2)


def step(engine: Engine) -> None:
    documents = [torch.arange(3 + i) % VOCABULARY for i in range(8)][engine.grid.dp_rank :: engine.layout.dp]
    engine.train_batch(PackedBatch.from_documents(documents), micro_batches=MicroBatchSpec(num=4))


def held(engine: Engine) -> Held:
    """All that this process has of an engine's model, copies included."""
    if not engine.is_here:
        return []
    whole = [(name, TensorSlice.whole(t.shape), t) for name, t in engine.buffers().items()]
    for name, parameter in engine.parameters().items():
        shard = engine.shards.get(name)
        whole.append((name, shard.part if shard else TensorSlice.whole(parameter.shape), parameter))
    return [(engine.ties.get(name, name), part, values.detach().clone()) for name, part, values in whole]


def send_all(rank: int) -> list[tuple[Held, Held, int, int]]:
    """For each pair of engines: what both hold once one has sent, and the versions of both on this rank."""
    found = []
    for model in MODELS:
        sources = [engine_of(side, model, True, number) for number, side in enumerate(model.sources)]
        targets = [engine_of(side, model, False, 99) for side in model.targets]
        for i, j in model.pairs:
            source, target = sources[i], targets[j]
            if source.is_here:
                step(source)
            assert source.send_weights(target) == source.version
            found.append((held(source), held(target), source.version, target.version))
        for target in targets:
            if target.is_here:
                target.generate([[1, 2]], SamplingParams(max_new_tokens=2))
        for engine in (*sources, *targets):
            engine.close()
    return found


@pytest.mark.shows(125)
def test_weights_arrive_bit_for_bit_between_any_two_layouts() -> None:
    by_rank = run_ranks(4, send_all, timeout_s=120.0)
    pairs = [(model, i, j) for model in MODELS for i, j in model.pairs]
    assert len(pairs) == len(by_rank[0]) >= 20
    for number, (model, i, j) in enumerate(pairs):
        check_arrived([[rank[number][side] for rank in by_rank] for side in range(2)])
        members = {*world_ranks(model.sources[i].layout), *world_ranks(model.targets[j].layout)}
        assert {by_rank[rank][number][2:] for rank in members} == {(j + 1, j + 1)}


def check_arrived(sides: list[list[Held]]) -> None:
    """Hold what the ranks of the engine that has received have against what those of the other have sent."""
    whole: dict[str, Tensor] = {}
    for name, part, values in (one for own in sides[0] for one in own):
        tensor = whole.setdefault(name, torch.full(part.full_shape, torch.nan).to(values.dtype))
        part.of(tensor).copy_(values)
    arrived = [one for own in sides[1] for one in own]
    assert {name for name, _, _ in arrived} == whole.keys() and len(whole) > 10
    for name, part, values in arrived:
        assert values.dtype == whole[name].dtype and torch.equal(values, part.of(whole[name])), name


def send_on_devices(rank: int, gpus: list[str]) -> tuple[Held, Held, list[str]]:
    """What both engines hold once one has sent to the other, if each rank computes on the GPU of this name.

    The groups between the ranks are all of gloo; their backends as they were asked for come last, and whether values
    were copied to the host.
    """
    asked = list[str]()
    make, properties = weight_transfer.group_at, SimpleNamespace(uuid=gpus[rank])
    move, to_host, copies = weight_transfer.WeightTransfer._move, Tensor.cpu, Counter[str]()

    def moved(*args: Any) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "cpu", lambda tensor: (copies.update(["to the host"]), to_host(tensor))[1])
            move(*args)

    def made(*args: Any, backend: str = "gloo") -> Any:
        asked.append(backend)
        return make(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_transfer, "group_at", made)
        patch.setattr(weight_transfer.WeightTransfer, "_move", moved)
        patch.setattr(weight_transfer, "_own_gpu", lambda source, target: torch.device("cpu"))
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        source, target = pair_of(Layout(pp=2, ranks=FIRST), Layout(pp=2, tp=2))
        for _ in range(2):
            source.send_weights(target)
    found = held(source), held(target), [*asked, *copies]
    for engine in (source, target):
        engine.close()
    return found


@pytest.mark.shows(213)
@pytest.mark.parametrize("gpus", ["abcd", "abca"])
def test_weights_stay_on_devices_where_each_rank_has_one_of_its_own(gpus: str) -> None:
    by_rank = run_ranks(4, send_on_devices, list(gpus), timeout_s=120.0)
    check_arrived([[rank[side] for rank in by_rank] for side in range(2)])
    asked, copies = ["gloo", "nccl"] if gpus == "abcd" else ["gloo"], ["to the host"] * (gpus == "abca")
    assert [rank[2] for rank in by_rank] == [[*asked, *copies]] * 2 + [asked] * 2


@pytest.mark.shows(213)
def test_a_rank_sends_from_the_gpu_of_both_its_engines_and_from_no_other() -> None:
    def side(device: str | None, transport: str = "auto") -> Any:
        local = None if device is None else SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(_local=local, options=SimpleNamespace(transport=transport))

    gpu = torch.device("cuda", 1)
    own = weight_transfer._own_gpu
    assert (
        own(side("cuda:1"), side(None)) == own(side(None), side("cuda:1")) == own(side("cuda:1"), side("cuda:1")) == gpu
    )
    assert own(side("cuda:1"), side("cpu")) is own(side("cpu"), side(None)) is None
    assert own(side("cuda:1"), side(None, "host")) is None


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within this context took at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[Tensor]] = []
        self.known: set[int] = set()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else [result]:
            if isinstance(one, Tensor):
                self.alive.append(weakref.ref(one))
        living = [tensor for ref in self.alive if (tensor := ref()) is not None]
        self.alive = [weakref.ref(tensor) for tensor in living]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in living}
        self.num_bytes = max(self.num_bytes, sum(n for where, n in storages.items() if where not in self.known))
        return result


def peaks_of(rank: int, gathers_first: bool) -> list[tuple[int, int, int]]:
    """Extra bytes of this rank in each of two sends, those of the largest tensor, and of the rank's own share."""
    found = []
    sides = [
        (Layout(tp=2, ranks=FIRST), Layout(pp=2, ranks=LAST)),
        (Layout(pp=2, ranks=LAST), Layout(tp=2, ranks=ALL[:2])),
    ]
    for source_layout, target_layout in sides[:1] if gathers_first else sides:
        source, target = pair_of(source_layout, target_layout, Model((), (), WIDE))
        source.send_weights(target)
        tensors = {name: t for engine in (source, target) if engine.is_here for name, t in engine.parameters().items()}
        peak = Peak()
        peak.known = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
        with peak:
            kept = [tensor.detach().clone() for tensor in tensors.values()] if gathers_first else []
            source.send_weights(target)
        del kept
        found.append((peak.num_bytes, WIDE.vocabulary * WIDE.hidden_size * 4, sum(t.nbytes for t in tensors.values())))
    return found


@pytest.mark.shows(125)
def test_a_rank_holds_its_share_and_at_most_one_tensor_more() -> None:
    for rank in run_ranks(4, peaks_of, False, timeout_s=60.0):
        for extra, largest, share in rank:
            assert 0 < extra <= largest < share / 3, "of one tensor what leaves or arrives"
    for rank in run_ranks(4, peaks_of, True, timeout_s=60.0):
        assert all(extra > largest for extra, largest, _ in rank), "the measure sees a copy of everything"


def refusals(rank: int) -> list[tuple[str, str]]:
    """What two engines that differ say on this rank, and what an engine that is not here says; then all still works."""
    here, there = Layout(ranks=(0,)), Layout(ranks=(1,))
    source, target = pair_of(here, there)
    others = (Model((), (), replace(DENSE, intermediate_size=24)), Model((), (), precision=Precision.BF16))
    other, half, tied = (pair_of(here, there, model)[1] for model in (*others, Model((), (), TIED)))
    found = []
    before = held(target)
    acts = [
        lambda: source.send_weights(other),
        lambda: source.send_weights(half),
        lambda: source.send_weights(tied),
        lambda: target.send_weights(source),
        lambda: source.send_weights(source),
        lambda: (target if rank == 0 else source).parameters(),
        lambda: source.send_weights(nn.Linear(1, 1)),  # pyright: ignore[reportArgumentType]
    ]
    for act in acts:
        with pytest.raises((ValueError, PipelineError)) as error:
            act()
        found.append((type(error.value).__name__, str(error.value)))
    assert all(torch.equal(a[2], b[2]) for a, b in zip(before, held(target), strict=True))
    source.send_weights(target)
    return found


def test_what_cannot_be_sent_is_refused_in_one_sentence_on_all_ranks() -> None:
    first, second = run_ranks(2, refusals)
    kinds, sentences = zip(*first, strict=True)
    assert kinds == ("ValueError",) * 5 + ("PipelineError", "ValueError")
    for sentence, words in zip(
        sentences,
        (
            "layers.0.mlp.gate.weight is float32 [20, 16] in the engine that sends, and float32 [24, 16]",
            "is float32 [37, 16] in the engine that sends, and bfloat16 [37, 16]",
            "the engine that receives has no head.projection.weight",
            "an engine that learns cannot receive weights",
            "cannot send weights to itself",
            "this engine is on ranks 1 of the world, and not on this one (rank 0)",
            "Linear",
        ),
        strict=True,
    ):
        assert words in sentence, sentence
    assert [one for i, one in enumerate(first) if i != 5] == [one for i, one in enumerate(second) if i != 5]


def same(one: Engine, other: Engine) -> bool:
    pairs = list(zip(held(one), held(other), strict=True))
    return len(pairs) > 10 and all(a[0] == b[0] and torch.equal(a[2], b[2]) for a, b in pairs)


def test_adapters_travel_with_the_weights_between_engines_that_both_have_them(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(folder := tmp_path / "model")
    adapter = LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    source, target = (
        Engine.from_hf(folder, adapter=adapter, learns=learns, seed=int(learns)) for learns in (True, False)
    )
    plain = Engine.from_hf(folder, learns=False)
    step(source)
    assert not same(source, target)
    source.send_weights(target)
    assert same(source, target)
    with pytest.raises(ValueError, match=r"no layers\.0.*both need the same model, with the same adapters"):
        source.send_weights(plain)

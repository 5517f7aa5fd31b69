"""LoRA adapters: trained as peft trains them, saved so that peft loads them, and the base weights keep their bits."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import Layout, MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.settings import AdapterConfig, OptimizerConfig
from tests.covering import EVERY
from tests.dist.launch import run_ranks
from tests.hugging_face import CLOSE, make_model, make_sequences, stored_tensors

LENGTHS = (7, 5, 9, 6, 4, 8, 3, 10)
NUM_STEPS, RATE = 2, 0.5
TARGETS = ["q_proj", "v_proj", "down_proj"]


@dataclass(frozen=True)
class Case:
    layout: Layout
    native: bool
    schedule: str = "1f1b"
    zero: bool = False
    recompute: str = "none"

    @property
    def name(self) -> str:
        return f"{self.layout} {self.native} {self.schedule} {self.recompute}".replace(" ", "-")


CASES = {
    1: [Case(Layout(), True), Case(Layout(), False)],
    2: [
        Case(Layout(pp=2), False, "zb-h1", recompute="full"),
        Case(Layout(cp=2), True),
    ],
    4: [
        Case(Layout(pp=4), False, "zb-h1"),
        Case(Layout(pp=2, dp=2), True, "interleaved", zero=True),
    ],
}
if EVERY:
    CASES[2] += [Case(Layout(pp=2), True, "zb-h1"), Case(Layout(dp=2), True, zero=True)]
    CASES[4] += [Case(Layout(pp=4), True), Case(Layout(pp=2, dp=2), False, "interleaved", recompute="full")]


def lora(**settings: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": TARGETS} | settings)


def opened(case: Case, folder: Path, adapter: Any) -> Engine:
    optimizer = OptimizerConfig(factory=partial(torch.optim.SGD, lr=RATE), clip_norm=0.0, zero=case.zero)
    options = EngineOptions(case.schedule, optimizer=optimizer, recompute=case.recompute, device="cpu", timeout_s=60.0)
    return Engine.from_hf(folder, case.layout, options, native=case.native, adapter=adapter)


def logits_of(engine: Engine, sequences: list[Tensor]) -> Tensor:
    every = engine.forward(PackedBatch.from_documents(sequences), broadcast=True)
    return every if isinstance(every, Tensor) else torch.cat(list(every))


def tuned(rank: int, cases: list[Case], folder: Path, out: Path) -> list[dict[str, Any]]:
    found = []
    for case in cases:
        plain = opened(case, folder, None)
        before = {name: p.detach().clone() for name, p in plain.parameters().items()}
        all_bytes = plain.state_bytes()
        plain.close()
        engine = opened(case, folder, lora())
        engine.save_adapter(out / case.name / "first")
        sequences = make_sequences(LENGTHS)
        batch = PackedBatch.from_documents(sequences[engine.grid.dp_rank :: case.layout.dp])
        for _ in range(NUM_STEPS):
            assert engine.train_batch(batch, micro_batches=MicroBatchSpec(num=4)).success
        engine.save_adapter(out / case.name / "last")
        after = {name.replace(".base_layer.", "."): p for name, p in engine.parameters().items() if "lora_" not in name}
        assert after.keys() == before.keys()
        again = opened(case, folder, out / case.name / "last")
        found.append(
            {
                "moved": [name for name, p in before.items() if not torch.equal(p, after[name])],
                "trained": [name for name, p in engine.parameters().items() if p.requires_grad],
                "gradients": (engine.state_bytes().gradients, all_bytes.gradients),
                "logits": logits_of(engine, sequences),
                "again": logits_of(again, sequences),
            }
        )
        engine.close()
        again.close()
    return found


def peft_model(base: Path, adapter: Path, trainable: bool = False) -> Any:
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(adapter), is_trainable=trainable).eval()


def trained_by_peft(base: Path, adapter: Path) -> dict[str, Tensor]:
    """Adapters after the same steps of peft's own model in one process."""
    model = peft_model(base, adapter, trainable=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    sequences = make_sequences(LENGTHS)
    num_labels = sum(len(sequence) - 1 for sequence in sequences)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for sequence in sequences:
            logits = model(sequence[None]).logits[0, :-1]
            (F.cross_entropy(logits, sequence[1:], reduction="sum") / num_labels).backward()
        optimizer.step()
    return {name.replace(".default", ""): p.detach() for name, p in model.named_parameters() if "lora_" in name}


@pytest.mark.shows(108)
@pytest.mark.parametrize("world", CASES)
def test_adapters_train_as_in_peft_which_loads_them_and_gives_the_same_logits(world: int, tmp_path: Path) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    make_model("llama").save_pretrained(base)
    by_rank = run_ranks(world, tuned, CASES[world], base, out, timeout_s=300.0)
    for index, case in enumerate(CASES[world]):
        first, last = (stored_tensors(out / case.name / name) for name in ("first", "last"))
        expected = trained_by_peft(base, out / case.name / "first")
        assert last.keys() == first.keys() == expected.keys() and len(last) == 2 * 3 * len(TARGETS)
        for name, adapter in last.items():
            assert not torch.equal(adapter, first[name]), name
            torch.testing.assert_close(adapter, expected[name], rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            theirs = peft_model(base, out / case.name / "last")
            wanted = torch.cat([theirs(sequence[None]).logits[0] for sequence in make_sequences(LENGTHS)])
            untrained = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
            plain = torch.cat([untrained(sequence[None]).logits[0] for sequence in make_sequences(LENGTHS)])
        assert (wanted - plain).abs().max() > 1e-2
        for of_rank in (found[index] for found in by_rank):
            assert of_rank["moved"] == []
            assert all(".lora_" in name for name in of_rank["trained"])
            torch.testing.assert_close(of_rank["logits"], wanted, rtol=0, atol=30 * CLOSE)
            assert torch.equal(of_rank["again"], of_rank["logits"])
            mine, plain_bytes = of_rank["gradients"]
            assert mine < 0.5 * plain_bytes
        assert sum(len(found[index]["trained"]) for found in by_rank) > 0


def first_adapters(rank: int, cases: list[Case], base: Path, out: Path) -> None:
    for case in cases:
        engine = opened(case, base, AdapterConfig(rank=2, target_modules=("k_proj", "o_proj")))
        engine.save_adapter(out / case.name)
        engine.close()


@pytest.mark.shows(108)
def test_first_values_depend_on_the_seed_alone(tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path / "base")
    cases = [Case(Layout(pp=2), True), Case(Layout(dp=2), False)]
    run_ranks(2, first_adapters, cases, tmp_path / "base", tmp_path, timeout_s=60.0)
    first_adapters(0, [Case(Layout(), True)], tmp_path / "base", tmp_path)
    [alone, *others] = [stored_tensors(tmp_path / case.name) for case in (Case(Layout(), True), *cases)]
    assert len(alone) == 2 * 2 * 3 and any(tensor.abs().max() > 0 for tensor in alone.values())
    for other in others:
        assert other.keys() == alone.keys() and all(torch.equal(tensor, alone[name]) for name, tensor in other.items())


def names_in_peft(base: Path, config: Any) -> set[str]:
    from peft import get_peft_model

    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    return {name.replace(".default", "") for name, _ in model.named_parameters() if "lora_" in name}


@pytest.mark.shows(108)
@pytest.mark.parametrize(
    "family, native, settings",
    [
        ("llama", True, {"target_modules": "ALL-LINEAR", "exclude_modules": ["down_proj"]}),
        ("llama", False, {"target_modules": r".*(q|k)_proj", "exclude_modules": r".*layers\.0\..*"}),
        ("llama", True, {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"}),
        ("gpt2", False, {"target_modules": "all-linear"}),
        ("gpt2", False, {"target_modules": None}),
    ],
)
def test_targets_are_those_of_peft_and_a_saved_model_has_its_adapters_beside_or_merged(
    family: str, native: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    base = tmp_path / "base"
    make_model(family).save_pretrained(base)
    engine = opened(Case(Layout(), native), base, lora(**settings))
    sequences = make_sequences(LENGTHS)
    assert engine.train_batch(PackedBatch.from_documents(sequences)).success
    mine = logits_of(engine, sequences)
    engine.save_hf(tmp_path / "apart")
    engine.save_hf(tmp_path / "merged", merge_adapters=True)
    engine.close()
    assert set(stored_tensors(tmp_path / "apart" / "adapter")) == names_in_peft(base, lora(**settings))
    beside = peft_model(tmp_path / "apart", tmp_path / "apart" / "adapter")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "apart", dtype=torch.float32).eval()
    with torch.no_grad():
        found, merged, untrained = (
            torch.cat([model(sequence[None]).logits[0] for sequence in sequences]) for model in (beside, alone, plain)
        )
    torch.testing.assert_close(mine, found, rtol=0, atol=30 * CLOSE)
    torch.testing.assert_close(mine, merged, rtol=0, atol=30 * CLOSE)
    assert (mine - untrained).abs().max() > 100 * CLOSE

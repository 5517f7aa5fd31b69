"""The operations that a step launches on a device, counted on tensors without data beside those of a plain loop."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.adamw import adamw

from penstock.data import MicroBatchSpec
from penstock.engine import EngineOptions
from penstock.engine.optimizer.steppers import AdamW, Block
from penstock.engine.rehearsal.meter import Meter
from penstock.engine.rehearsal.place import RehearsedPlace
from penstock.engine.rehearsal.step import RehearsedBatch, rehearse
from penstock.engine.rehearsal.units import without_values
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.schedule import Action, Op
from penstock.settings import Layout, LearningRate, ModelConfig, OptimizerConfig, Precision

# 111M parameters in 39 tensors.
CONFIG = ModelConfig(32000, 1024, 2816, 4, 16, num_kv_heads=4, max_length=4096)
BATCH = RehearsedBatch([512] * 8, MicroBatchSpec(num=4))
CLIPPED = OptimizerConfig(LearningRate(1e-3), clip_norm=1.0)

_NO_LAUNCH = {"device", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_local_scalar_dense"}


class LaunchMeter(Meter):
    """A meter that counts, by the names of operations, what launches work on a device: all but views."""

    def __init__(self) -> None:
        super().__init__()
        #: since the last action ended; and of each action that has ended, with its name
        self.launches: Counter[str] = Counter()
        self.by_action: list[tuple[str, Counter[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        name = func._schema.name.partition("::")[2]
        self.launches.update([name] if not is_view and name not in _NO_LAUNCH else [])
        return super().__torch_dispatch__(func, types, args, kwargs)

    def restart(self) -> None:
        super().restart()
        self.launches.clear()

    def point(self, name: str) -> Any:
        self.by_action.append((name, self.launches))
        self.launches = Counter()
        return super().point(name)


def units(groups: ModelGroups) -> Sequence[UnitSpec]:
    return decoder_units(CONFIG, groups=groups)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> LaunchMeter:
    """Counts what is rehearsed for a device."""
    place = RehearsedPlace(0, torch.device("meta"), LaunchMeter())
    monkeypatch.setattr(RehearsedPlace, "of", lambda device, rank: place)
    assert isinstance(place.meter, LaunchMeter)
    return place.meter


def step_launches(meter: LaunchMeter) -> tuple[Counter[str], Counter[str]]:
    """The launches of the program, and of what follows it in a rehearsed step."""
    names = [name for name, _ in meter.by_action]
    end = names.index(str(Action(Op.STEP)))
    program: Counter[str] = Counter()
    for _, launches in meter.by_action[:end]:
        program += launches
    return program, meter.by_action[end][1]


def plain_end() -> Counter[str]:
    """The launches after the backwards in a plain loop: clipping by torch's own way, and its fused AdamW."""
    meter = LaunchMeter()
    with without_values(), torch.device("meta"):
        shapes = [p.shape for unit in units(ModelGroups()) for p in unit.build().parameters()]
        weights, gradients, means, squares = ([torch.zeros(shape) for shape in shapes] for _ in range(4))
        steps = [torch.zeros(()) for _ in shapes]
        with meter, torch.no_grad():
            norm = torch.linalg.vector_norm(torch.stack(torch.ops.aten._foreach_norm(gradients, 2)))
            torch.ops.aten._foreach_mul_(gradients, (1.0 / (norm + 1e-6)).clamp(max=1.0))
            numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
            flags = {"fused": True, "amsgrad": False, "maximize": False}
            adamw(weights, gradients, means, squares, [], steps, **flags, **numbers)  # type: ignore[arg-type]
    return meter.launches


@pytest.mark.shows(209)
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
def test_a_step_launches_little_more_than_a_plain_loop(precision: Precision, meter: LaunchMeter) -> None:
    options = EngineOptions("1f1b", precision=precision, optimizer=CLIPPED, device="cuda")
    rehearse(units, CONFIG.hidden_size, Layout(), options, BATCH)
    program, end = step_launches(meter)
    plain = program.total() + plain_end().total()
    assert program.total() + end.total() <= 1.1 * plain
    # Matrices lie in three buckets and norms in one: each is compared with its masters by three operations and
    # published by one; none is multiplied by the factor of clipping, and norms take one launch for all.
    assert end.total() <= plain_end().total() + 4 * 6
    assert end["_foreach_norm"] == 1 and end["linalg_vector_norm"] == end["mul_"] == 0


@pytest.mark.shows(209)
def test_the_kernel_that_takes_the_factor_steps_as_one_that_follows_a_pass_of_its_own() -> None:
    results: list[list[Tensor]] = []
    for in_kernel in (False, True):
        values, gradient = torch.randn(2, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        block = Block(0, values, gradient, [])
        stepper = AdamW([block])
        numbers = {**AdamW.hyperparameters, "lr": 0.1}
        for _ in range(3):
            if in_kernel:
                stepper._step([block], numbers, 0.3)
            else:
                stepper.step([numbers], 0.3)
        results.append([block.master, block.gradient, *block.state.values()])
    torch.testing.assert_close(*results)


@pytest.mark.shows(209)
@pytest.mark.parametrize(
    "dtype, is_in_kernel", [(torch.float32, True), (torch.complex64, True), (torch.float64, False)]
)
def test_a_factor_that_fp32_would_round_has_a_pass_of_its_own(dtype: torch.dtype, is_in_kernel: bool) -> None:
    with without_values(), torch.no_grad():
        values, gradient = torch.zeros(2, 64, dtype=dtype, device="meta")
        stepper = AdamW([Block(0, values, gradient, [])])
        with LaunchMeter() as meter:
            stepper.step([{**AdamW.hyperparameters, "lr": 0.1}], 0.3)
    assert meter.launches["mul_"] == (not is_in_kernel)

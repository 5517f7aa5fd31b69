"""On a GPU every schedule's step is that of the CPU, and what only orders or saves work changes no bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, PackedBatch
from penstock.settings import ModelConfig, Precision
from tests.gpu.small_engines import DENSE, EXPERTS, SPEC, made, taken, texts

SCHEDULES = ["afab", "1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min"]
PAIRED = ["combined-1f1b", "combined-interleaved"]


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_step_of_every_schedule_is_that_of_the_cpu(schedule: str, device: str) -> None:
    # Sums in fp32 in another order; TF32 would be a thousand times as far away.
    taken(made("cpu", schedule)).check_close(taken(made(device, schedule)), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", ["1f1b", *PAIRED])
def test_a_step_with_experts_is_that_of_the_cpu(schedule: str, device: str) -> None:
    taken(made("cpu", schedule, EXPERTS)).check_close(taken(made(device, schedule, EXPERTS)), 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16, Precision.BF16_AUTOCAST])
def test_a_step_in_16_bit_is_near_that_in_fp32(precision: Precision, config: ModelConfig, device: str) -> None:
    exact = taken(made("cpu", config=config))
    losses = taken(made(device, config=config, precision=precision)).losses
    # Rounded to 8 bits, of which many are averaged.
    assert losses == pytest.approx(exact.losses, rel=0.02)


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "interleaved"])
def test_weight_gradients_that_wait_have_the_bits_of_those_that_do_not(
    schedule: str, precision: Precision, device: str
) -> None:
    taken(made(device, precision=precision)).check_bits(taken(made(device, schedule, precision=precision)))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16])
@pytest.mark.parametrize("recompute", ["full", (1, 3)], ids=str)
def test_what_is_recomputed_has_the_bits_of_what_is_kept(
    recompute: Any, precision: Precision, config: ModelConfig, device: str
) -> None:
    kept = taken(made(device, config=config, precision=precision))
    kept.check_bits(taken(made(device, config=config, precision=precision, recompute=recompute)))


@pytest.mark.gpu
@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("precision", [Precision.FP32, Precision.BF16, Precision.BF16_AUTOCAST])
def test_a_run_has_the_bits_of_its_repetition(precision: Precision, device: str) -> None:
    taken(made(device, precision=precision)).check_bits(taken(made(device, precision=precision)))


# ---- a user's own layers


class Gain(nn.Module):
    """Scales the stream by a weight of the batch, which comes from the host with each microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)

    def forward(self, x_TD: Tensor, gain: Tensor) -> Tensor:
        return x_TD + self.norm(x_TD) * gain[:, None]


def own_layers() -> list[nn.Module]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return [nn.Embedding(256, 64), block, Gain(), nn.BatchNorm1d(64), nn.Linear(64, 256)]


def with_gains() -> PackedBatch:
    batch = texts((40, 7, 33, 12))
    return batch.with_key("gain", torch.linspace(0.5, 1.5, batch.num_tokens))


@pytest.mark.gpu
def test_a_step_of_own_layers_is_that_of_a_plain_loop(device: str) -> None:
    layers, batch = own_layers(), with_gains()
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        total = torch.zeros(())
        for part in batch.unpack():
            x_TD = layers[0](part["tokens"])
            x_TD = layers[3](layers[2](layers[1](x_TD), part["gain"]))
            total = total + nn.functional.cross_entropy(layers[4](x_TD), part["labels"], reduction="sum")
        counted = int((batch["labels"] != -100).sum())
        (total / counted).backward()
        optimizer.step()
        losses.append(float(total) / counted)
    given = own_layers()
    engine = Engine.from_layers(
        given,
        64,
        device=device,
        optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1),  # pyright: ignore
    )
    found = [engine.train_batch(batch, micro_batches=SPEC).loss for _ in range(2)]
    assert found == pytest.approx(losses, rel=1e-4)
    state = engine.state(optimizer=False)
    names = [f"{i}.{name}" for i, layer in enumerate(layers) for name in layer.state_dict()]
    assert len(state) >= len([name for name in names if "num_batches" not in name])
    engine.close()

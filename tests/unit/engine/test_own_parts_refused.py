"""A user's own layers, optimizers, schedules and evaluations that cannot work are named, and say what would."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import BatchError, ConfigError, Engine, MicroBatchSpec, OptimizerConfig, PackedBatch

WIDTH = 8
FREE = [nn.Parameter(torch.zeros(2))]


def batch(labels: tuple[int, ...] = (2, 3, -100), **keys: Any) -> PackedBatch:
    return PackedBatch.from_sequences({"tokens": [[1, 2, 3]], "labels": [list(labels)], **keys})


def engine(*middle: nn.Module, **options: Any) -> Engine:
    return Engine.from_layers([nn.Embedding(16, WIDTH), *middle, nn.Linear(WIDTH, 7)], WIDTH, **options)


class Narrow(nn.Module):
    """Multiplies by a matrix of another height than the stream's width."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH - 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Kept(nn.Module):
    """Has a weight of its own dtype."""

    def __init__(self, dtype: torch.dtype, learns: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH).to(dtype), requires_grad=learns)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.detach().real.to(x.dtype)


@pytest.mark.shows(164)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex32], ids=str)
def test_a_dtype_in_which_nothing_can_be_trained_is_refused_by_name_and_frozen_it_is_kept(dtype: torch.dtype) -> None:
    possible = "float32, float64, bfloat16, float16, complex64, complex128, or to freeze it"
    words = rf"layers\.1\.weight is of {dtype}, in which nothing can be trained; possible are {possible}"
    with pytest.raises(ValueError, match=words):
        engine(Kept(dtype, learns=True), precision="bf16")
    own = engine(Kept(dtype, learns=False), precision="bf16")
    assert own.train_batch(batch((2, 3, 4))).success
    assert own.parameters()["layers.1.weight"].dtype is dtype
    assert own.parameters()["layers.2.weight"].dtype is torch.bfloat16


@pytest.mark.shows(164)
def test_a_linear_layer_of_another_dtype_than_its_input_is_refused_as_by_torch() -> None:
    for precision in ("fp32", "bf16-autocast"):
        own = engine(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), precision=precision)
        with pytest.raises(RuntimeError, match=r"layers\.1 \(Linear\): .* (same dtype|Double)"):
            own.train_batch(batch((2, 3, 4)))


class Custom(ArithmeticError):
    """Has more than a message."""

    def __init__(self, number: int) -> None:
        super().__init__(f"number {number}")


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise Custom(3)


def test_a_layer_that_cannot_compute_is_named_and_nothing_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    log, records = logging.getLogger("torch._subclasses.fake_tensor"), []
    monkeypatch.setattr(log, "handlers", [handler := logging.Handler()])
    monkeypatch.setattr(handler, "emit", records.append)
    own = engine(nn.Linear(WIDTH, WIDTH), Narrow())
    for call in (own.train_batch, own.forward):
        with pytest.raises(RuntimeError, match=r"layers\.2 \(Narrow\): mat1 and mat2 shapes .* \(3x8 and 7x8\)"):
            call(batch())
    assert not records
    log.error("logged again")
    assert len(records) == 1


def test_an_error_that_is_more_than_its_message_stays_itself_and_bears_the_layer_as_a_note() -> None:
    with pytest.raises(Custom) as caught:
        engine(Raises()).train_batch(batch())
    assert str(caught.value) == "number 3"
    assert caught.value.__notes__[0] == "in the layer layers.1 (Raises)"


@pytest.mark.shows(113)
@pytest.mark.parametrize(
    ("tokens", "labels", "words"),
    [
        ((1, 2, 16), (2, 3, -100), r"data\['tokens'\]: sequence 0 has 16 at its place 2"),
        ((1, 2, 3), (2, -4, -100), r"data\['labels'\]: sequence 0 has -4 at its place 1"),
    ],
)
def test_an_embedding_is_given_no_token_that_it_does_not_have(tokens: Any, labels: Any, words: str) -> None:
    own = engine()
    before = {name: p.detach().clone() for name, p in own.parameters().items()}
    with pytest.raises(BatchError, match=words):
        own.train_batch(PackedBatch.from_sequences({"tokens": [list(tokens)], "labels": [list(labels)]}))
    assert all(torch.equal(p, before[name]) for name, p in own.parameters().items())
    assert own.train_batch(batch()).success


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(12, WIDTH)

    def forward(self, images: Tensor) -> Tensor:
        return self.linear(images.flatten(1))


def test_a_first_layer_may_take_images_in_the_place_of_tokens() -> None:
    layers = [Seen(), nn.Linear(WIDTH, 5)]
    own = Engine.from_layers(layers, WIDTH, optimizer=partial(torch.optim.SGD, lr=0.1))
    images = torch.randn(4, 3, 2, 2)
    lengths = [[1]] * 4
    given = PackedBatch.from_data({"tokens": images, "labels": torch.arange(4)}, {"tokens": lengths, "labels": lengths})
    expected = nn.Sequential(*layers)(images)
    assert torch.equal(own.forward(given, micro_batches=MicroBatchSpec()), expected)
    loss = nn.functional.cross_entropy(expected, torch.arange(4))
    assert own.train_batch(given).loss == pytest.approx(loss.item(), rel=1e-6)
    with pytest.raises(
        BatchError, match=r"no 'tokens', which the first layer is given; .* \['images', 'labels'\] \(a "
    ):
        own.train_batch(given.remap({"tokens": "images"}))
    with pytest.raises(BatchError, match=r"data\['tokens'\]: torch.float32; token ids are"):
        own.train_batch(PackedBatch.from_sequences({"tokens": [[0.5, 1.0]], "labels": [[1, 2]]}))


def nothing(groups: Any) -> Any:
    return None


def raising(groups: Any) -> Any:
    return groups[0]["rate"]


def another(groups: Any) -> Any:
    return torch.optim.SGD(FREE, lr=0.1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (nothing, "the optimizer factory nothing gave a NoneType; it gives a torch.optim.Optimizer of the parameter"),
        (
            raising,
            "the optimizer raising is not made of parameter groups with a small matrix each: it raises KeyError",
        ),
        (another, "the optimizer factory another gave an optimizer of other parameters than those"),
        (another(()), "^optimizer is an instance of SGD, .* give the class SGD, or functools.partial of it"),
    ],
    ids=["nothing", "raises", "others", "instance"],
)
def test_what_makes_no_optimizer_is_named(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        engine(optimizer=given)
    if callable(given):
        with pytest.raises(ConfigError, match=words):
            engine(optimizer=OptimizerConfig(factory=given))


def test_an_evaluation_of_nothing_is_refused() -> None:
    own = engine()
    for nothing_left in ([], iter(())):
        with pytest.raises(ValueError, match=r"batches is empty on every rank, .* give at least one PackedBatch"):
            own.evaluate(nothing_left)
    assert own.evaluate([batch()]) > 0

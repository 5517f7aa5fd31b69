"""What layers keep where no engine can see it is refused by name, in a sentence that says what would be possible."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, ScheduleConfig
from tests.dist.launch import run_ranks

WIDTH, VOCAB = 8, 16
WORLDS = (1, 2)
SPLIT = MicroBatchSpec(num=2)


def batch() -> PackedBatch:
    return PackedBatch.from_documents([torch.arange(n) for n in (5, 3, 7, 4)])


def opened(layers: Sequence[Any], world: int, **options: Any) -> Engine:
    return Engine.from_layers(layers, WIDTH, Layout(pp=world), device="cpu", timeout_s=60.0, **options)


def closed(engine: Engine) -> None:
    engine.close()
    engine.grid.close()


def words_of(call: Callable[[], object]) -> str:
    """What an exception says; fails if there is none."""
    with pytest.raises(Exception) as caught:
        call()
    return str(caught.value)


# ---- state beside tensors


class Keeps(nn.Module):
    """Has an extra state that is given to it, as layers with statistics of 8-bit numbers do."""

    def __init__(self, state: object) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> object:
        return self.state

    def set_extra_state(self, state: object) -> None:
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        return x


def saved(rank: int, world: int, folder: Path) -> list[str]:
    """What is said of each extra state at the first save, "" where it is saved."""
    found = []
    for number, state in enumerate(({"calls": 3}, torch.ones(()), 0, None, torch.zeros(0), {}, b"")):
        layers = [nn.Embedding(VOCAB, WIDTH), nn.Sequential(Keeps(state)), nn.Linear(WIDTH, VOCAB)]
        engine = opened(layers, world)
        assert engine.train_batch(batch()).success
        save = partial(engine.save, folder / str(number))
        if number < 3:
            found.append(words_of(save))
            assert not any(folder.glob(f"{number}/*"))
        else:
            save()
        closed(engine)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_extra_state_is_refused_at_the_first_save_unless_there_is_none(world: int, tmp_path: Path) -> None:
    for found in run_ranks(world, saved, world, tmp_path):
        assert len(found) == 3
        for words in found:
            assert "layers.1.0 keeps an extra state (get_extra_state of Keeps)" in words
            assert "register_buffer" in words


# ---- another layer's parameters


class Reads(nn.Module):
    """Multiplies by the weight of the embedding, which it finds in what it is given to hold."""

    def __init__(self, hold: Any, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        # Set beside `nn.Module.__setattr__`, which would register a module.
        self.__dict__["hold"] = hold
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        weight = self.read(self.hold)
        return x + x @ weight.T @ weight


class Given(nn.Module):
    def forward(self, x: Tensor, *, weight: Tensor) -> Tensor:
        return x + x @ weight.T @ weight


def ways(embedding: nn.Embedding) -> dict[str, nn.Module | partial[Any]]:
    """A layer that reads the embedding's weight, in all ways in which it may hold it unregistered."""
    in_list = Reads([embedding], lambda held: held[0].weight)
    return {
        "a list": in_list,
        "a layer within": nn.Sequential(nn.Tanh(), in_list),
        "a dictionary": Reads({"a": {"b": embedding}}, lambda held: held["a"]["b"].weight),
        "an attribute": Reads(embedding, lambda held: held.weight),
        "a parameter in a tuple": Reads((0, embedding.weight), lambda held: held[1]),
        "a function": Reads(lambda: embedding.weight, lambda held: held()),
        "a default": Reads(lambda own=embedding: own.weight, lambda held: held()),
        "a method": Reads(embedding.get_parameter, lambda held: held("weight")),
        "a partial": Reads(partial(getattr, embedding, "weight"), lambda held: held()),
        "an object": Reads(SimpleNamespace(of=embedding), lambda held: held.of.weight),
        "a weak reference": Reads(weakref.ref(embedding), lambda held: held().weight),
        "an argument": partial(Given(), weight=embedding.weight),
    }


WAYS = tuple(ways(nn.Embedding(1, 1)))


def reading(way: str) -> list[nn.Module | partial[Any]]:
    torch.manual_seed(0)
    embedding = nn.Embedding(VOCAB, WIDTH)
    return [embedding, ways(embedding)[way], nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)]


def read(rank: int, world: int) -> list[tuple[str, str, list[float]]]:
    """By way: what is said where the two layers lie apart, "" for one rank; and the losses where they lie together."""
    found = []
    for way in WAYS:
        words, options = "", dict[str, Any]()
        if world > 1:
            words = words_of(lambda way=way: opened(reading(way), world, schedule=ScheduleConfig("1f1b", cut=(1, 3))))
            options = {"schedule": ScheduleConfig("1f1b", cut=(2, 2))}
        engine = opened(reading(way), world, **options)
        found.append((way, words, [engine.train_batch(batch(), micro_batches=SPLIT).loss for _ in range(2)]))
        closed(engine)
    return found


def test_a_layer_that_reads_anothers_parameter_is_refused_where_they_lie_apart() -> None:
    one, two = (run_ranks(world, read, world) for world in WORLDS)
    for of_rank in two:
        for (way, words, losses), (_, _, expected) in zip(of_rank, one[0], strict=True):
            assert "layers.1 reads layers.0.weight by way of its attribute '" in words, (way, words)
            assert "so the ranks 0, 1 would each go on with a weight of their own; assign the parameter itself" in words
            assert len(set(expected)) == 2 and losses == pytest.approx(expected, rel=1e-6), way


HELD: list[nn.Embedding] = []


class ReadsGlobal(nn.Module):
    """Knows the embedding by a variable of the file."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x @ HELD[0].weight.T @ HELD[0].weight


def read_globally(rank: int, world: int) -> str:
    """What the first step says, "" where it is taken."""
    embedding = nn.Embedding(VOCAB, WIDTH)
    HELD[:] = [embedding]
    layers = [embedding, nn.Linear(WIDTH, WIDTH), ReadsGlobal(), nn.Linear(WIDTH, VOCAB)]
    engine = opened(layers, world, schedule=ScheduleConfig("1f1b", cut=(4,) if world == 1 else (2, 2)))
    words = ""
    try:
        assert engine.train_batch(batch()).success
    except Exception as error:
        words = str(error)
        with pytest.raises(Exception, match=r"layers\.0\.weight"):
            engine.train_batch(batch())
        assert engine.step == 0
    closed(engine)
    return words


@pytest.mark.parametrize("world", WORLDS)
def test_a_parameter_on_another_rank_is_found_whichever_way_a_layer_reaches_it(world: int) -> None:
    for words in run_ranks(world, read_globally, world):
        if world == 1:
            assert words == ""
        else:
            assert "in the stage that begins with layers.2 a layer or the loss reaches layers.0.weight" in words


class Unsuspicious(nn.Module):
    """Holds its own things twice, and a weight that is tied."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight, self.inner = weight, nn.Linear(WIDTH, WIDTH)
        self.lstm, self.project, self.all = nn.LSTM(WIDTH, WIDTH), self.product, [self.inner.weight, {"a": self.inner}]
        self.inner.__dict__["outer"] = self

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.inner(self.lstm(x)[0]))


def unsuspected(rank: int, world: int) -> None:
    embedding = nn.Embedding(VOCAB, WIDTH)
    layers = [embedding, nn.Linear(WIDTH, WIDTH), Unsuspicious(embedding.weight)]
    # A second engine finds what the first has left in the layers.
    for _ in range(2):
        engine = opened(layers, world)
        assert engine.train_batch(batch()).success
        closed(engine)


@pytest.mark.parametrize("world", WORLDS)
def test_what_a_layer_holds_of_itself_and_tied_weights_are_no_reason(world: int) -> None:
    run_ranks(world, unsuspected, world)


# ---- buffers that layers share


class Shares(nn.Module):
    """Adds what a module that other layers have too makes of its input."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.linear = shared, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.shared(x))


class Constant(nn.Module):
    """Rotary factors and masks are like this."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("factors", torch.randn(WIDTH), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("factors")


class Assigned(Constant):
    """Puts a new tensor in the place of its buffer."""

    factors: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.factors = self.factors * 0.5
        return super().forward(x)


class Averages(nn.Module):
    """A running mean in a tensor that it is given."""

    mean: Tensor

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        return x - self.mean


def twice(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    return module, module


def of_one_tensor() -> tuple[nn.Module, nn.Module]:
    mean = torch.zeros(WIDTH)
    return Averages(mean), Averages(mean)


PAIRS: dict[str, Callable[[], tuple[nn.Module, nn.Module]]] = {
    "constant": lambda: twice(Constant()),
    "persistent constant": lambda: twice(Constant(True)),
    "batch normalisation": lambda: twice(nn.BatchNorm1d(WIDTH, affine=False)),
    "assigned": lambda: twice(Assigned()),
    "persistent, assigned": lambda: twice(Assigned(True)),
    "of one tensor": of_one_tensor,
}


def shared(rank: int, world: int) -> dict[tuple[str, str], str]:
    """By pair of modules and precision what is said of it, "" where it trains."""
    found = {}
    for pair, make in PAIRS.items():
        for precision in ("fp32", "bf16"):
            torch.manual_seed(0)
            one, other = make()
            layers = [nn.Embedding(VOCAB, WIDTH), Shares(one), Shares(other), nn.Linear(WIDTH, VOCAB)]
            cut = (4,) if world == 1 else (2, 2)
            engine = opened(layers, world, precision=precision, schedule=ScheduleConfig("1f1b", cut=cut))
            before = {name: own.detach().clone() for name, own in (engine.parameters() | engine.buffers()).items()}
            try:
                assert engine.train_batch(batch()).success
                assert engine.train_batch(batch()).success
                found[pair, precision] = ""
            except Exception as error:
                found[pair, precision] = str(error)
                now = engine.parameters() | engine.buffers()
                assert engine.step == 0
                assert all(torch.equal(own, before[name]) for name, own in now.items())
            closed(engine)
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_a_step_that_changes_a_buffer_that_layers_share_is_refused_unless_it_is_one_tensor(world: int) -> None:
    for found in run_ranks(world, shared, world):
        for (pair, precision), words in found.items():
            # Casts part the tensor in two modules, but one module has one.
            parts = world > 1 or (pair == "of one tensor" and precision == "bf16")
            if "constant" in pair or not parts:
                assert not words, (pair, precision, words)
            else:
                assert "is a buffer that layers share, and the step changes it" in words, (pair, precision)
                assert "layers.1.shared." in words or "layers.2.shared." in words


# ---- what the batch holds


class Cleans(nn.Module):
    """Changes the rows of a key in place."""

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + tokens.clamp_(max=3)[:, None]


class Rows(nn.Module):
    """Takes rows of floating point, and scales them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(0.5))


def cleaned(rank: int, world: int) -> str:
    """What is said of a later layer that changes token ids in place; of rows nothing is."""
    engine = opened([nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH), Cleans(), nn.Linear(WIDTH, VOCAB)], world)
    words = words_of(lambda: engine.train_batch(batch()))
    closed(engine)
    engine = opened([Rows(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCAB)], world)
    data = {"tokens": [torch.randn(n, WIDTH) for n in (5, 3)], "labels": [torch.arange(n) for n in (5, 3)]}
    assert engine.train_batch(PackedBatch.from_sequences(data)).success
    closed(engine)
    return words


@pytest.mark.parametrize("world", WORLDS)
def test_a_layer_that_changes_what_the_batch_holds_is_refused_by_name(world: int) -> None:
    for words in run_ranks(world, cleaned, world):
        assert "layers.2 changes the batch's 'tokens' in place, which no other rank and no recomputation" in words
        assert "tokens.clone()" in words


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def test_a_tensor_that_a_layer_changes_though_a_backward_needs_it_is_told_with_the_layers() -> None:
    engine = opened([nn.Embedding(VOCAB, WIDTH), nn.Sigmoid(), Doubles(), nn.Linear(WIDTH, VOCAB)], 1)
    words = words_of(lambda: engine.train_batch(batch()))
    assert words.startswith(
        "a tensor that the layers from layers.0 to layers.3 need for their backward was changed in place, by "
        "layers.2; let the layer work on a copy (one of the variables needed"
    )
    engine.close()

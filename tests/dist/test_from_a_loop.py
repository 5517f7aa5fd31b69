"""A plain loop taken over: attention over packed sequences, a loss of (logits, labels), any optimizer and scheduler."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from penstock import Engine, Labels, Layout, Metric, MicroBatchSpec, OptimizerConfig, PackedBatch, num_loss_tokens
from penstock.data import split
from penstock.model import Sequences, reduction_of_labels
from tests.dist.launch import run_ranks

WIDTH, VOCAB, HEADS = 8, 16, 2
SPEC, STEPS = MicroBatchSpec(num=6), 2
PAGE = "docs/tutorials/from_a_training_loop.md"


# ---- the loop: its layers, batches and losses


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(16, WIDTH)

    def forward(self, tokens: Tensor, sequences: Sequences) -> Tensor:
        return self.tokens(tokens) + self.positions(sequences.positions)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, sequences: Sequences) -> Tensor:
        qkv = self.qkv(self.norm(x)).view(len(x), 3 * HEADS, -1).transpose(0, 1).split(sequences.lengths, dim=1)
        attended = torch.cat([scaled_dot_product_attention(*own.chunk(3), is_causal=True) for own in qkv], dim=1)
        return x + self.out(attended.transpose(0, 1).flatten(1))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Embed(), *(Block() for _ in range(4)), nn.Linear(WIDTH, VOCAB)]


def batch_of(step: int) -> PackedBatch:
    """Lines of unequal lengths; the single token of the first has no label."""
    generator = torch.Generator().manual_seed(step)
    lengths = [1, *torch.randint(2, 9, (17,), generator=generator).tolist()]
    return PackedBatch.from_documents([torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths])


def smoothed(logits: Tensor, labels: Tensor) -> tuple[Tensor, dict[str, Metric]]:
    hits = (logits.argmax(-1) == labels).sum()
    return cross_entropy(logits, labels, label_smoothing=0.1), {"hits": Metric(hits)}


LOSSES: dict[str, Callable[..., Any]] = {
    "module": nn.CrossEntropyLoss(),
    "function": Labels(smoothed, reduction="mean"),
    "sum": partial(cross_entropy, reduction="sum"),
}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5)


def plain(loss_fn: Callable[..., Any], num: int = 6) -> dict[str, Any]:
    """Losses, rates and evaluations of a loop of torch alone, and its last weights."""
    model = nn.ModuleList(layers())
    optimizer = optimizer_of(model.parameters())
    scheduler, found = cosine(optimizer), []

    def losses_of(batch: PackedBatch, learns: bool) -> float:
        microbatches, every = split(batch, MicroBatchSpec(num=num)).microbatches, []
        total = num_loss_tokens(batch)
        for own in microbatches:
            x, sequences = own["tokens"], Sequences.from_lengths(own.sequence_lengths("tokens"))
            for layer in model:
                x = layer(x, sequences) if isinstance(layer, Embed | Block) else layer(x)
            loss = loss_fn(x, own["labels"])
            loss = loss[0] if isinstance(loss, tuple) else loss
            if loss_fn is not LOSSES["sum"]:
                loss = loss * int((own["labels"] != -100).sum())
            if learns:
                (loss := loss * (1 / total)).backward()
            every.append(loss.detach())
        return float(torch.stack(every).sum()) / (1 if learns else total)

    for step in range(1, STEPS + 1):
        rate = scheduler.get_last_lr()[0]
        found += [losses_of(batch_of(step), True), rate]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        found.append(losses_of(batch_of(0), False))
    named = {f"layers.{name}": own.detach().clone() for name, own in model.named_parameters()}
    return {"numbers": found, "weights": named}


def engine_of(pp: int, schedule: str = "1f1b", model: Sequence[nn.Module] | None = None) -> Engine:
    optimizer = OptimizerConfig(factory=optimizer_of, scheduler=cosine, clip_norm=0.0)
    layout = Layout(pp=pp)
    return Engine.from_layers(model or layers(), WIDTH, layout, schedule=schedule, optimizer=optimizer, timeout_s=30.0)


def taken_over(rank: int, pp: int, schedules: Sequence[str]) -> list[dict[str, Any]]:
    """The same of an engine, for each schedule and loss."""
    results = []
    for schedule in schedules:
        for loss_fn in LOSSES.values():
            engine, found = engine_of(pp, schedule), []
            for step in range(1, STEPS + 1):
                taken = engine.train_batch(batch_of(step), loss_fn, micro_batches=SPEC)
                evaluated = engine.evaluate(batch_of(0), loss_fn, micro_batches=SPEC)
                assert evaluated.loss == evaluated == engine.evaluate([batch_of(0)], loss_fn, micro_batches=SPEC)
                assert list(taken.metrics) == list(evaluated.metrics) == ["hits"] * isinstance(loss_fn, Labels)
                found += [taken.loss, taken.learning_rate, evaluated.loss]
            weights = {name: own.detach().clone() for name, own in engine.parameters().items()}
            results.append({"numbers": found, "weights": weights})
            engine.close()
    return results


@pytest.mark.shows(189)
@pytest.mark.parametrize(
    ("pp", "schedules"), [(1, ["1f1b"]), (2, ["1f1b", "interleaved", "zb-v"]), (3, ["1f1b", "interleaved", "zb-v"])]
)
def test_a_plain_loop_keeps_its_bits(pp: int, schedules: list[str]) -> None:
    by_rank = [taken_over(0, 1, schedules)] if pp == 1 else run_ranks(pp, taken_over, pp, schedules, timeout_s=120.0)
    wanted = [plain(loss_fn) for loss_fn in LOSSES.values()] * len(schedules)
    assert wanted[0]["numbers"][0] == pytest.approx(math.log(VOCAB), rel=0.2)
    for number, expected in enumerate(wanted):
        own = [found[number] for found in by_rank]
        assert all(one["numbers"] == expected["numbers"] for one in own)
        weights = {name: value for one in own for name, value in one["weights"].items()}
        assert weights.keys() == expected["weights"].keys()
        assert all(torch.equal(weights[name], value) for name, value in expected["weights"].items())


@pytest.mark.shows(189)
def test_a_mean_over_tokens_is_one_for_any_microbatches() -> None:
    """And the mean of the microbatches' means, where that is asked for."""
    whole, *others = (
        engine_of(1).train_batch(batch_of(1), LOSSES["module"], micro_batches=MicroBatchSpec(num=n)) for n in (1, 2, 9)
    )
    summed = engine_of(1).train_batch(batch_of(1), micro_batches=SPEC)
    for taken in (*others, summed):
        assert (taken.loss, taken.grad_norm) == pytest.approx((whole.loss, whole.grad_norm), rel=1e-6)
    # The first of these microbatches has no label, and adds nothing.
    parts = [PackedBatch.from_documents([[1]]), PackedBatch.from_documents([[1, 2, 3, 4, 5]]), batch_of(2)]
    engine = engine_of(1)
    each = [float(engine.evaluate(own)) for own in parts[1:]]
    means = engine.train_batch(parts[1:], LOSSES["module"], normalize="microbatch_mean").loss
    assert means == pytest.approx(sum(each) / 2, rel=1e-6)
    assert engine_of(1).train_batch(parts, LOSSES["module"]).loss == pytest.approx(
        (4 * each[0] + num_loss_tokens(parts[2]) * each[1]) / (4 + num_loss_tokens(parts[2])), rel=1e-6
    )


# ---- what is refused, in one sentence


UNSAID = r"does not say what it gives of them; give Labels\(loss_fn, reduction='mean'\) or 'sum', or let it have an"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "no word of it": (lambda logits, labels: cross_entropy(logits, labels), UNSAID),
    "weights of classes": (nn.CrossEntropyLoss(torch.linspace(1, 3, VOCAB)), "loss_fn has a weight for each class"),
    "another padding": (nn.CrossEntropyLoss(ignore_index=0), "loss_fn has ignore_index=0; tokens without a label have"),
    "no reduction": (nn.CrossEntropyLoss(reduction="none"), "loss_fn has reduction='none'"),
    "another word": (Labels(cross_entropy, "middle"), "loss_fn has reduction='middle'"),
    "each token": (
        Labels(lambda logits, label: logits.logsumexp(-1), "mean"),
        r"gave a tensor of shape \[\d+\]; it gives one number",
    ),
    "a number": (Labels(lambda logits, label: 1.0, "sum"), "gave a float; it gives one number"),
}
ROWS = batch_of(1).num_tokens


@pytest.mark.shows(189)
@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_does_not_say_whether_it_is_a_mean_or_a_sum_is_refused(name: str) -> None:
    loss_fn, words = REFUSED[name]
    engine = engine_of(1)
    for call in (engine.train_batch, engine.evaluate):
        with pytest.raises(ValueError, match=words) as caught:
            call(batch_of(1), loss_fn, micro_batches=MicroBatchSpec(num=1))
        assert "\n" not in str(caught.value)
    assert engine.train_batch(batch_of(1), LOSSES["module"]).step == 1


@pytest.mark.shows(189)
def test_labels_have_to_be_there_and_classes() -> None:
    engine, loss_fn = engine_of(1), LOSSES["module"]
    tokens = [[1, 2, 3], [4, 5]]
    with pytest.raises(ValueError, match="no 'labels', which the loss reads"):
        engine.evaluate(PackedBatch.from_sequences({"tokens": tokens}), loss_fn)
    with pytest.raises(ValueError, match="a loss that reads none needs a loss_weight_fn of its own"):
        engine.train_batch(
            PackedBatch.from_sequences({"tokens": tokens}), lambda output, _: output.square().sum(), normalize=5.0
        )
    with pytest.raises(ValueError, match="float32; token ids are"):
        engine.evaluate(PackedBatch.from_sequences({"tokens": tokens, "labels": [[0.5] * 3, [0.5] * 2]}), loss_fn)
    pair = nn.Sequential(nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)), Pair()
    with pytest.raises(ValueError, match="but the last layer gave a tuple; give a function of"):
        engine_of(1, model=pair).train_batch(batch_of(1), loss_fn)


class Pair(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, VOCAB)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x.sum()


@pytest.mark.shows(189)
def test_a_name_says_what_a_loss_is_given() -> None:
    """That of the second parameter."""
    for name in ("label", "labels", "target", "targets"):
        assert reduction_of_labels(eval(f"lambda logits, {name}: 0")) == ""
    assert reduction_of_labels(cross_entropy) == "mean" and reduction_of_labels(LOSSES["sum"]) == "sum"
    assert reduction_of_labels(Labels(lambda x, y: 0, "sum")) == "sum"
    for loss_fn in (lambda logits, microbatch: 0, lambda labels, output: 0, lambda labels: 0, lambda *labels: 0):
        assert reduction_of_labels(loss_fn) is None
    assert reduction_of_labels(torch.compile(nn.CrossEntropyLoss(reduction="sum"), backend="eager")) == "sum"


class Padded(nn.Module):
    """A layer of a loop over [B, T], which fails in its own way."""

    def __init__(self, fail: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.fail = nn.Parameter(torch.ones(WIDTH)), fail

    def forward(self, x: Tensor) -> Tensor:
        self.fail(x)
        return x * self.weight


def taken_apart(x: Tensor) -> None:
    _, _, _ = x.shape


def raising(error: Exception) -> Callable[[Tensor], Any]:
    def fail(x: Tensor) -> None:
        raise error

    return fail


class EinopsError(RuntimeError):
    """As einops has it."""


FAILING: dict[str, Callable[[Tensor], Any]] = {
    "shape": taken_apart,
    "view": lambda x: x.view(3, 16, WIDTH),
    "transpose": lambda x: x.transpose(1, 2),
    "permute": lambda x: x.permute(0, 2, 1),
    "einsum": lambda x: torch.einsum("btd,bsd->bts", x, x),
    "bmm": lambda x: torch.bmm(x, x),
    "index": lambda x: x[:, :, 0],
    "mask": lambda x: (x @ x.T).masked_fill(torch.ones(3, 3).bool(), 0),
    "positions": lambda x: nn.functional.embedding(torch.arange(len(x)), torch.ones(2, WIDTH)),
    "einops": raising(EinopsError("Wrong shape: expected 3 dims. Received 2-dim tensor.")),
}


def told(rank: int, pp: int, names: Sequence[str]) -> list[str]:
    found = []
    for name in names:
        model = [nn.Embedding(VOCAB, WIDTH), Padded(FAILING[name]), nn.Linear(WIDTH, VOCAB)]
        engine = engine_of(pp, model=model)
        with pytest.raises(Exception) as caught:
            engine.train_batch(batch_of(1), micro_batches=MicroBatchSpec(num=1))
        found.append("; ".join([str(caught.value), *getattr(caught.value, "__notes__", ())]))
        engine.close()
    return found


@pytest.mark.shows(189)
@pytest.mark.parametrize(("pp", "names"), [(1, list(FAILING)), (2, ["shape", "einops"])])
def test_a_layer_of_b_t_is_told_what_it_was_given(pp: int, names: list[str]) -> None:
    by_rank = [told(0, 1, names)] if pp == 1 else run_ranks(pp, told, pp, names)
    given = re.escape(
        f"it was given [{ROWS}, {WIDTH}], all tokens of a microbatch end to end, and no [B, T]: see {PAGE}"
    )
    for texts in by_rank:
        assert all(re.search(rf"layers\.1 \(Padded\).*{given}", text) for text in texts), texts
    assert (Path(__file__).parents[2] / PAGE).exists()

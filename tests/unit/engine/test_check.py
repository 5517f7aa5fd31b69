"""`penstock.check`: breaches of contract that it names, parts that are right, and its report."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import EngineOptions, Layout, PackedBatch, check, num_loss_tokens, token_cross_entropy
from penstock.engine.check.comparison import Check
from penstock.engine.check.observed import Observed, Quantity
from penstock.engine.check.own_parts import OwnParts
from penstock.engine.check.report import Cause, CheckReport, Way
from tests.unit.engine.check_cases import BREACHES, RIGHT, Block, Case, batch, changed, model, nats

EXAMPLES = Path(__file__).parents[3] / "examples"


def report_of(case: Case) -> CheckReport:
    layers, given = case.make()
    return check(layers, given.pop("batch", None) or batch(), **given)


def of_name(name: str) -> Case:
    return next(case for case in (*BREACHES, *RIGHT) if case.name == name)


@pytest.mark.shows(196)
@pytest.mark.parametrize("case", BREACHES, ids=[case.name for case in BREACHES])
def test_a_breach_of_contract_is_named(case: Case) -> None:
    report = report_of(case)
    assert report.first is not None, "nothing differs"
    assert set(case.causes) <= set(report.first.causes), str(report)
    assert (Cause.REFUSED in report.first.causes) == (Cause.REFUSED in case.causes), str(report)


@pytest.mark.shows(196)
@pytest.mark.parametrize("case", RIGHT, ids=[case.name for case in RIGHT])
def test_a_part_that_is_right_raises_no_alarm(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    report = report_of(case)
    assert report.is_equal, str(report)
    assert "not compared" not in report.compared or ("draw" in case.name or "noise" in case.name), str(report)
    assert not caplog.records


@pytest.mark.shows(165)
@pytest.mark.parametrize("pp", [2, 3])
def test_a_parameter_of_the_loss_in_the_last_layer_is_trained_as_by_a_plain_loop(pp: int) -> None:
    layers, given = of_name("a parameter of the loss in the last layer").make()
    check(layers, batch(), Layout(pp=pp), steps=3, **given).raise_if_different()


def test_forty_kinds_of_breaches_and_forty_right_parts_are_held() -> None:
    assert len(BREACHES) >= 40
    assert len(RIGHT) >= 40


@pytest.mark.shows(196)
def test_the_report_says_where_the_first_difference_is_and_raises_on_request() -> None:
    layers = [nn.Embedding(16, 8), Block(), Block(), nn.Linear(8, 16)]
    right = check(layers, batch())
    right.raise_if_different()
    assert str(right) == (
        "equal, bit for bit: 2 steps in 2 stages as in a plain loop, after a save and load, under activation "
        "checkpointing, and with 4 and 2 microbatches"
    )
    noisy = report_of(of_name("noise in evaluation too"))
    assert str(noisy).startswith(str(right))
    assert str(noisy).endswith(
        "; not compared are the sums over microbatches, for a layer draws random numbers in evaluation too"
    )
    report = report_of(of_name("a counter of two layers"))
    assert report.first is not None
    assert (report.first.way, report.first.step, report.first.microbatch) == (Way.STAGES, 1, 0)
    with pytest.raises(AssertionError) as raised:
        report.raise_if_different()
    first, *causes = str(raised.value).splitlines()
    assert first == "step 1, microbatch 0, in stages: the output of layers.2 differs (other bits)"
    assert causes[0].startswith("  usual cause: a layer leaves something for a layer of another stage")
    assert causes[1].startswith("  or: a layer or the loss looks at how often")


@pytest.mark.shows(196)
def test_the_layers_the_batch_and_random_numbers_stay_as_they_are() -> None:
    layers, given = model(nn.Sequential(Block(), nn.BatchNorm1d(8), nn.Dropout(0.5))), batch()
    types = [type(part) for layer in layers for part in layer.modules()]
    before = copy.deepcopy([layer.state_dict() for layer in layers])
    torch.manual_seed(1)
    state = torch.get_rng_state()
    assert check(layers, given).is_equal
    assert torch.equal(state, torch.get_rng_state())
    for layer, kept in zip(layers, before, strict=True):
        assert all(torch.equal(own, kept[name]) for name, own in layer.state_dict().items())
        assert all(own.grad is None for own in layer.parameters())
    assert [type(part) for layer in layers for part in layer.modules()] == types
    assert given.digest() == batch().digest()


@pytest.mark.shows(196)
def test_what_ends_a_check_leaves_the_layers_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Views of one element too, and every tensor keeps its own memory."""
    layers = model(nn.Sequential(Block(), nn.BatchNorm1d(8)))
    layers[2].register_buffer("scale", torch.full((1,), 0.5).expand(8))
    tensors = [tensor for layer in layers for tensor in layer.state_dict(keep_vars=True).values()]
    before = [(tensor.data_ptr(), tensor.stride(), tensor.clone()) for tensor in tensors]
    run_plain = Check.run_plain

    def ends(self: Check, *arguments: Any) -> Observed:
        if self.plain.values:
            raise KeyboardInterrupt
        return run_plain(self, *arguments)

    monkeypatch.setattr(Check, "run_plain", ends)
    with pytest.raises(KeyboardInterrupt):
        check(layers, batch())
    for tensor, (place, stride, values) in zip(tensors, before, strict=True):
        assert (tensor.data_ptr(), tensor.stride()) == (place, stride)
        assert torch.equal(tensor, values)


def example(name: str) -> Any:
    """The example's module, without running it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.shows(105)
def test_a_model_of_an_encoder_and_a_decoder_in_four_stages_is_a_plain_loop() -> None:
    own = example("encoder_decoder")
    torch.manual_seed(0)
    encoder, decoder = [own.EncoderLayer() for _ in range(2)], [own.DecoderLayer() for _ in range(3)]
    layers = [own.Read(own.VOCAB, own.WIDTH), *encoder, own.Join(own.VOCAB, own.WIDTH), *decoder]
    layers.append(own.Write(own.WIDTH, own.VOCAB))
    given = own.words(torch.Generator().manual_seed(1))
    check(layers, given, Layout(pp=4), schedule="zb-h1").raise_if_different()


@pytest.mark.shows(105)
def test_a_model_of_pictures_and_words_is_a_plain_loop() -> None:
    own = example("vision_language")
    torch.manual_seed(0)
    layers = [own.LookAndRead(), own.Block(), own.Block(), own.Block(), nn.Linear(own.WIDTH, own.VOCAB)]
    check(layers, own.pictures(torch.Generator().manual_seed(1)), Layout(pp=4)).raise_if_different()


@pytest.mark.parametrize("quantity", Quantity)
def test_each_quantity_is_compared(quantity: Quantity) -> None:
    """A value that is another in one place alone is found there."""
    parts = OwnParts(model(), token_cross_entropy, num_loss_tokens, EngineOptions(device="cpu"))
    one = Check(parts, batch(), Layout(pp=2), 2, 4, 2)
    one.run_plain(parts.copied(), 4, 2, one.plain)
    places = [place for place in one.plain.values if place.kind is quantity]
    assert places
    changed = places[-1]

    def run(found: Observed) -> None:
        found.values |= one.plain.values
        value = found.values[changed]
        found.values[changed] = value + 1 if isinstance(value, int) else value.clone().add_(1)

    found = one.compare(Way.STAGES, one.plain, run)
    assert found is not None
    assert (found.step, found.what) == (changed.step, f"{quantity.value} {changed.name}".strip() + " differs")


@pytest.mark.shows(196)
def test_more_stages_and_other_schedules_are_checked_too() -> None:
    assert check(model(), batch(), Layout(pp=4), schedule="zb-h1", steps=3).is_equal


def test_what_cannot_be_checked_is_refused_in_one_sentence() -> None:
    one = PackedBatch.from_documents([[1, 2, 3]])
    script: Any = torch.jit.script(Block())
    asks = changed(lambda layer, x, colour: x)
    for words, act in {
        "pipeline stages alone": lambda: check(model(), batch(), Layout(dp=2)),
        "give 2 or more": lambda: check(model(), batch(), steps=1),
        "2 items or more to split; this one has 1": lambda: check(model(), one),
        "which compile = True changes": lambda: check(model(), batch(), compile=True),
        "precision = fp16 cannot be checked": lambda: check(model(), batch(), precision="fp16"),
        "an engine has no option": lambda: check(model(), batch(), optimiser="adamw"),
        "copy of a ScriptModule cannot be trained": lambda: check(model(script), batch()),
        "LBFGS steps with a closure": lambda: check(model(), batch(), optimizer=torch.optim.LBFGS),
        "layers.1 takes 'colour', which has no default and is no key": lambda: check(model(asks), batch()),
    }.items():
        with pytest.raises(ValueError, match=words):
            act()


@pytest.mark.shows(196)
@pytest.mark.parametrize("is_late", [False, True])
def test_numbers_that_are_none_are_refused_with_their_place(is_late: bool) -> None:
    def loss_fn(logits: torch.Tensor, microbatch: PackedBatch, step: int) -> torch.Tensor:
        scale = float("nan") if step == 2 or not is_late else 1.0
        return nats(logits, microbatch) * scale

    place = "step 2, microbatch 0" if is_late else "step 1, microbatch 0"
    with pytest.raises(ValueError, match=f"^{place}: the loss is NaN in a plain loop"):
        check(model(), batch(), loss_fn=loss_fn)


def test_a_parameter_that_is_nan_is_refused_with_its_name() -> None:
    layers: list[Any] = model()
    with torch.no_grad():
        layers[0].weight[-1] = float("nan")
    given = PackedBatch.from_documents([[1, 2, 3], [2, 3], [3, 4, 5, 6]])
    with pytest.raises(ValueError, match=r"^step 1: layers\.0\.weight is NaN in a plain loop"):
        check(layers, given)


def test_an_error_of_ones_own_in_a_plain_loop_names_its_layer() -> None:
    with pytest.raises(RuntimeError, match=r"^layers\.1 \(Linear\): mat1 and mat2"):
        check([nn.Embedding(16, 4), nn.Linear(8, 16)], batch())


def test_a_loss_that_is_no_tensor_is_refused_as_an_engine_refuses_it() -> None:
    with pytest.raises(ValueError, match=r"^loss_fn gave a float; a step learns from"):
        check(model(), batch(), loss_fn=lambda logits, microbatch: float(logits.sum()))

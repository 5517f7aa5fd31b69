"""What fused pairs cannot do is refused by one sentence before anything starts, and what gains nothing is said."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock import Engine, PackedBatch, schedule
from penstock.cli.main import main
from penstock.engine.options import EngineOptions
from penstock.runtime import PipelineError
from penstock.schedule import Pair
from tests.e2e.training import write_run

EXPERTS = ["--experts.num_experts", "4"]
COMBINED = ["--schedule.name", "combined-1f1b"]
REFUSED = {
    "weights apart without pairs": (
        ["--schedule.split_backward", "true"],
        r"split_backward = true is no option of schedule.name = '1f1b'; possible are combined-1f1b, combined-inter",
    ),
    "groups without interleaving": (
        [*COMBINED, "--schedule.group_size", "2"],
        r"group_size = 2 is no option.* possible",
    ),
    "early release without overlap": (
        [*COMBINED, "--schedule.early_release", "true", "--schedule.overlap", "false"],
        r"early_release = true .* schedule.overlap = false; leave out one",
    ),
    "early release without pairs": (["--schedule.early_release", "true"], r"1f1b has none; combined-1f1b, .* do"),
    "several stages where one is meant": ([*COMBINED, "--schedule.stages_per_rank", "2"], r"must be 1, got 2"),
    "more active experts than experts": ([*EXPERTS, "--experts.num_active", "5"], r"num_active = 5 .*at most 4"),
    "more ranks than experts": (
        [*EXPERTS, *COMBINED, "--parallel.dp", "8", "--parallel.ep", "8"],
        r"parallel.ep = 8 .*num_experts = 4; at most as many",
    ),
    "no experts to share": (
        [*COMBINED, "--parallel.dp", "2", "--parallel.ep", "2"],
        r"parallel.ep = 2 .*num_experts = 0",
    ),
}


@pytest.mark.shows(48)
@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(
    words: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["train", str(write_run(tmp_path, "run", 1)), *words])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("penstock: ") and err.count("\n") == 1, err
    assert re.search(told, err), err
    assert not (tmp_path / "run").exists()


def test_the_schedules_that_a_refusal_names_have_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", str(write_run(tmp_path, "run", 1)), "--schedule.early_release", "true"])
    told = capsys.readouterr().err
    named = {name for name in schedule.names() if re.search(rf"[;,] {name}\b(?!-)| and {name} do", told)}
    built = {name: schedule.build(name, ranks=2, microbatches=4) for name in schedule.names() if name != "auto"}
    assert named == {
        name for name, found in built.items() if any(isinstance(step, Pair) for order in found.orders for step in order)
    }


@pytest.mark.shows(48)
def test_overlap_that_gains_nothing_is_said_once_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = write_run(tmp_path, "run", 6)
    assert main(["train", str(file), *COMBINED]) == 0
    told = capfd.readouterr().err
    assert told.count("so overlap gains nothing") == 1
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count('"loss"') == 6


def small_engine(layers: list[nn.Module]) -> Engine:
    return Engine.from_layers(layers, 4, options=EngineOptions(schedule="combined", device="cpu"))


def small_batch() -> PackedBatch:
    return PackedBatch.from_documents([torch.arange(5), torch.arange(4)])


class Two(nn.Module):
    """Gives a pair where one tensor is wanted."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


@pytest.mark.shows(48)
def test_what_is_no_loss_and_what_is_no_stream_is_told_when_it_is_given() -> None:
    def vector(output: Tensor, microbatch: PackedBatch) -> Tensor:
        return output.sum(-1)

    def nothing_to_learn(output: Tensor, microbatch: PackedBatch) -> Tensor:
        return output.detach().sum()

    def metrics(output: Tensor, microbatch: PackedBatch) -> dict[str, Tensor]:
        return {"mean": output.mean()}

    engine = small_engine([nn.Embedding(8, 4), nn.Linear(4, 8)])
    for loss_fn, told in ((vector, r"shape \[\d\]"), (nothing_to_learn, "without a graph"), (metrics, "a dict")):
        with pytest.raises(ValueError, match=f"loss_fn gave .*{told}.*`forward`"):
            engine.train_batch(small_batch(), loss_fn=loss_fn)  # type: ignore[arg-type]
    assert engine.train_batch(small_batch()).success
    with pytest.raises(
        PipelineError, match=r"layers\.2, given the 2 tensors of the layer before: .*takes 2 positional arguments"
    ):
        small_engine([nn.Embedding(8, 4), Two(), nn.Linear(4, 8)]).train_batch(small_batch())

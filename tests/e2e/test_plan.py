"""`penstock plan`: its file trains as it is, and its mistakes are one sentence."""

import json
from pathlib import Path

import pytest

from penstock import planner
from penstock.cli.main import main
from penstock.planner import ModelShape
from penstock.settings import read_config
from tests.covering import EVERY
from tests.e2e.training import CORPUS

CLUSTER = 'host_type = "cpu"\nnum_devices = 2\n'
RUN = """
output = "{folder}/out"
[model]
hidden_size = 64
intermediate_size = 96
num_layers = 3
num_heads = 4
max_length = 64
[data]
corpus = "{folder}/corpus.py"
cache = "{folder}/cache"
tokenizer = "bytes"
sequence_length = 64
num_sequences = 8
[train]
steps = 2
num_microbatches = 8
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path, Path]:
    run, cluster = tmp_path / "run.toml", tmp_path / "two.toml"
    (tmp_path / "corpus.py").write_text(CORPUS)
    run.write_text(RUN.format(folder=tmp_path))
    cluster.write_text(CLUSTER)
    return run, cluster, tmp_path / "planned.toml"


@pytest.mark.shows(144)
@pytest.mark.parametrize(("num_devices", "wanted"), [(2, "tp2"), (4, "pp2")] if EVERY else [(2, "tp2")])
def test_a_plans_file_trains_as_it_is(
    files: tuple[Path, Path, Path], num_devices: int, wanted: str, capfd: pytest.CaptureFixture[str]
):
    run, cluster, planned = files
    words = ["plan", str(run), "--cluster", str(cluster), "--devices", str(num_devices), "--json"]
    assert main(words) == 0
    printed = capfd.readouterr()
    assert len(printed.err.splitlines()) < 5, "few lines where nobody watches"
    best = json.loads(printed.out)["best"]
    number = next(i for i, one in enumerate(best, start=1) if wanted in one["layout"])
    assert main([*words, "--output", str(planned), "--choose", str(number)]) == 0
    settings, config = best[number - 1]["settings"], read_config(planned)
    assert config.parallel.world_size == num_devices
    assert config.schedule.name == settings["schedule.name"]
    assert config.train.num_microbatches == settings["train.num_microbatches"]
    capfd.readouterr()
    assert main(["train", str(planned), "--dry-run", "--json"]) == 0
    stages = [len(stage["units"]) for stage in json.loads(capfd.readouterr().out)["stages"]]
    assert stages == settings.get("schedule.cut", [8])
    assert main(["train", str(planned), "--json"]) == 0
    steps = [json.loads(line) for line in (planned.parent / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps if "loss" in one] == [1, 2]


def test_a_published_model_with_few_labels_is_planned_faster(
    files: tuple[Path, Path, Path], capfd: pytest.CaptureFixture[str]
):
    words = ["plan", "--model", "llama3-8b", "--cluster", "h100", "--sequences", "64", "--effort", "0.05", "--json"]

    def tokens_s(*more: str) -> float:
        assert main([*words, *more]) == 0
        return json.loads(capfd.readouterr().out)["best"][0]["tokens_s_device"]

    assert tokens_s("--label-share", "0.1") > 1.01 * tokens_s()
    for share in ("0", "1.5", "-1", "nan"):
        assert main([*words, "--label-share", share]) == 2
        assert "above 0 up to 1 is possible" in capfd.readouterr().err


@pytest.mark.shows(173)
def test_the_plan_of_a_published_model_is_written_as_a_run_that_trains_as_it_is(
    files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
):
    run, cluster, planned = files
    tiny = ModelShape("*-*E", 64, 300, 4, 2, 16, intermediate_size=96, num_experts=4, num_active=2, expert_size=32)
    monkeypatch.setattr(planner, "published_model", lambda name: tiny)
    words = ["--model", "tiny", "--cluster", str(cluster), "--sequences", "8", "--length", "64", "--effort", "0.05"]
    words += ["--label-share", "0.25"]
    assert main(["plan", *words, "--output", str(planned)]) == 0
    config = read_config(planned)
    assert config.data.label_share == 0.25
    assert ModelShape.of(config.model) == tiny and config.parallel.world_size == 2
    folder = run.parent
    own = ["--data.corpus", str(folder / "corpus.py"), "--data.cache", str(folder / "cache"), "--train.steps", "1"]
    assert main(["train", str(planned), *own, "--output", str(folder / "out"), "--json"]) == 0
    steps = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in steps if "loss" in one] == [1]


@pytest.mark.shows(146)
def test_mistakes_are_refused(files: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]):
    run, cluster, planned = files
    for arguments, message in (
        ([str(run), "--cluster", "h10"], "no host is called 'h10'; did you mean 'h100'"),
        ([str(run), "--model", "llama3-8b", "--cluster", "h100"], "either a run's TOML file or --model NAME"),
        (["--model", "lama3-8b", "--cluster", "h100"], "no model is called 'lama3-8b'; did you mean 'llama3-8b'"),
        (["--model", "llama3-405b", "--cluster", "a100", "--sequences", "8"], "no layout of 8 devices fits"),
        ([str(run), "--cluster", str(cluster), "--devices", "0"], "--devices must be at least 1"),
        ([str(run), "--cluster", str(cluster), "--output", str(planned), "--choose", "11"], "--choose takes numbers"),
        ([str(run), "--cluster", str(cluster), "--explain", "0", "1"], "--explain takes numbers from 1 to 10, not 0"),
    ):
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert not planned.exists()
    run.write_text(run.read_text().replace("max_length = 64", "max_length = 32"))
    assert main(["plan", str(run), "--cluster", str(cluster)]) == 2
    assert "longer than model.max_length = 32" in capsys.readouterr().err

"""Calibration: the constants come back from the steps of the runs that they made, from the library and the command."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from penstock import planner
from penstock.cli.main import main
from penstock.planner.calibrate import MeasuredRun, calibrate, candidate_of, median_step_s
from penstock.settings import RunConfig, from_dict

MADE_BY = planner.Constants(compute=0.43, action_s=0.002)


def config(schedule: str, num_microbatches: int, **sizes: int) -> RunConfig:
    return from_dict(
        {
            "output": "runs/none",
            "model": {
                "vocab_size": 512,
                "hidden_size": 512,
                "num_layers": 4,
                "num_heads": 8,
                "intermediate_size": 1024,
            },
            "data": {"sequence_length": 256, "num_sequences": 32},
            "schedule": {"name": schedule},
            "parallel": sizes,
            "train": {"num_microbatches": num_microbatches, "precision": "fp32"},
            "optimizer": {"zero": sizes.get("dp", 1) > 1},
        }
    )


def cluster(devices: int) -> planner.Cluster:
    return planner.Cluster.named("cpu", devices)


def run_of(settings: RunConfig, made_by: planner.Constants = MADE_BY) -> MeasuredRun:
    workload = planner.Workload(planner.ModelShape.of(settings.model), 256, 32, "fp32")
    candidate = candidate_of(settings)
    step = planner.estimate(workload, candidate, cluster(candidate.layout.world_size), made_by).step_s
    return MeasuredRun(workload, candidate, step)


RUNS = [config("1f1b", 8, pp=2), config("zb-h1", 32, pp=2, dp=1), config("interleaved", 8, pp=2, dp=2)]


def test_constants_come_back_from_the_steps_that_they_make():
    found = calibrate([run_of(settings) for settings in RUNS], cluster)
    assert found.compute == pytest.approx(MADE_BY.compute, rel=0.01)
    assert found.action_s == pytest.approx(MADE_BY.action_s, rel=0.01)
    alone = calibrate([run_of(RUNS[0])], cluster, replace(planner.Constants(), action_s=MADE_BY.action_s))
    assert alone.compute < MADE_BY.compute, "with one run, its actions' time is taken for slow products"


@pytest.mark.parametrize("factor", [1e-4, 1e4])
def test_steps_of_other_devices_are_refused(factor: float):
    run = run_of(RUNS[0])
    with pytest.raises(ValueError, match=r"the constants that fit best make it .* these very devices trained"):
        calibrate([replace(run, step_s=factor * run.step_s)], cluster)


def test_a_runs_layout_is_its_settings():
    found = candidate_of(RUNS[2])
    assert (found.layout.pp, found.layout.dp, found.schedule, found.stages_per_rank) == (2, 2, "interleaved", 2)
    assert (found.microbatch, found.num_microbatches, found.zero) == (2, 8, 1)
    with pytest.raises(ValueError, match="equally many whole sequences"):
        candidate_of(config("1f1b", 3, pp=2))
    assert median_step_s([9.0, 9.0, 1.0, 3.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="at least 5 are needed"):
        median_step_s([1.0] * 4)


@pytest.mark.shows(172)
@pytest.mark.parametrize(
    ("made_by", "fewer", "bound"),
    [
        (planner.Constants(compute=1.05, action_s=0.02), 1.0, "compute is at its bound of 1: "),
        # With many actions, a step is shorter than its products and those of the others make it.
        (MADE_BY, 0.6, "action_s is at its bound of 0: "),
    ],
)
def test_a_constant_at_its_bound_is_said_in_the_result_and_by_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], made_by: planner.Constants, fewer: float, bound: str
):
    words = ["plan", str(tmp_path / "0" / "run.toml"), "--cluster", "cpu", "--devices", "2", "--effort", "0.01"]
    runs = []
    for number, settings in enumerate(RUNS):
        run = run_of(settings, made_by)
        runs.append(replace(run, step_s=run.step_s * (fewer if number == 1 else 1.0)))
        write_run(tmp_path / str(number), settings, runs[-1].step_s)
        words += ["--calibrate", str(tmp_path / str(number))]
    (found,) = calibrate(runs, cluster).at_bounds
    assert found.startswith(bound)
    assert main([*words, "--json"]) == 0
    printed = capsys.readouterr()
    assert found in printed.err and json.loads(printed.out)["constants"]["at_bounds"] == [found]


@pytest.mark.shows(172)
def test_constants_within_their_bounds_are_not_called_otherwise():
    assert calibrate([run_of(settings) for settings in RUNS], cluster).at_bounds == ()
    assert planner.Constants().at_bounds == ()


def write_run(folder: Path, settings: RunConfig, step_s: float) -> None:
    from penstock.engine.folders.runs import to_toml

    folder.mkdir()
    (folder / "run.toml").write_text(to_toml(settings))
    times = [3.0, 3.0, step_s, step_s, "fast", step_s]
    lines = [json.dumps({"step": step, "step_time_s": time}) for step, time in enumerate(times, start=1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_command_fits_runs_and_names_those_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["plan", str(tmp_path / "0" / "run.toml"), "--cluster", "cpu", "--devices", "2", "--json"]
    for number, settings in enumerate(RUNS):
        write_run(tmp_path / str(number), settings, run_of(settings).step_s)
        words += ["--calibrate", str(tmp_path / str(number))]
    assert main(words) == 0
    assert "--compute 0.43 --action-us 2000" in capsys.readouterr().err
    (tmp_path / "2" / "metrics.jsonl").write_text("[]\n")
    assert main(words) == 2
    assert "2 cannot calibrate a plan: it has the times of 0 steps" in capsys.readouterr().err
    assert main([*words[:-1], str(tmp_path / "none")]) == 2
    assert "run.toml cannot be read" in capsys.readouterr().err

"""The planner's predictions of published runs, each with constants that were fitted on others."""

import csv
from pathlib import Path

import pytest
from benchmarks.plan_published import Prediction, by_group, predict_runs, summary
from benchmarks.published import STYLES, TimedRun, read_runs

from penstock.planner.times import Constants

pytestmark = pytest.mark.subject(
    "src/penstock/planner/*.py",
    "src/penstock/schedule/**/*.py",
    "src/penstock/settings/layout.py",
    "benchmarks/plan_published.py",
    "benchmarks/published.py",
    "benchmarks/measured_runs.csv",
)

RUNS = Path(__file__).parents[2] / "benchmarks" / "measured_runs.csv"


def predicted(source: str, *fit_where: tuple[str, str]) -> list[Prediction]:
    runs, _ = read_runs(RUNS)
    chosen = [run for run in runs if source in run.row["source"]]
    assert chosen
    return predict_runs(chosen, fit_where)


@pytest.mark.shows(139)
@pytest.mark.shows(140)
def test_zero_bubble_rows_follow_from_the_others_of_their_source():
    found = predicted("2401.10241", ("schedule", "1F1B"), ("schedule", "1F1B-I"))
    assert len({(one.constants.compute, one.constants.action_s) for one in found}) == 1, "one pair for the source"
    new = [one for one in found if not one.fitted]
    assert len(new) >= 12 and all(one.run.row["schedule"].startswith("ZB") for one in new)
    # Nothing of this is fitted.
    memory = [one.memory_error for one in found if one.memory_error is not None]
    assert len(memory) == 36 and max(map(abs, memory)) <= 0.1
    errors = [abs(one.error) for one in new]
    assert sum(errors) / len(errors) <= 0.019 and max(errors) <= 0.036
    settings = {(one.run.row["model"], one.run.row["num_microbatches"], one.run.row["schedule"]): one for one in found}
    pairs = [
        (settings[model, number, "1F1B-I"], one) for (model, number, name), one in settings.items() if name == "ZB-1p"
    ]
    # A setting in which both were measured alike has no faster one.
    pairs = [(a, b) for a, b in pairs if a.run.measured_s != b.run.measured_s]
    assert len(pairs) >= 5
    for ours, other in pairs:
        assert (ours.predicted_s < other.predicted_s) == (ours.run.measured_s < other.run.measured_s), other.run.row


@pytest.mark.shows(141)
def test_the_analytic_rows_are_each_predicted_by_the_others():
    found = predicted("2205.05198")
    errors = [abs(one.error) for one in found]
    assert len(found) >= 6 and not any(one.fitted for one in found)
    assert sum(errors) / len(errors) <= 0.036 and max(errors) <= 0.08


@pytest.mark.shows(139)
def test_peaks_of_torchtitan_follow_where_microbatch_and_recomputation_are_published():
    rows = [one for one in predicted("torchtitan") if one.run.row["pp"] == "1" and "AC" in one.run.row["note"]]
    errors = [abs(one.memory_error) for one in rows if one.memory_error is not None]
    # Nothing of this is fitted.
    assert len(rows) == len(errors) == 12 and max(errors) <= 0.1 and sum(errors) / len(errors) <= 0.03


@pytest.mark.shows(172)
def test_torchtitans_long_contexts_follow_from_its_short_ones():
    found = predicted("torchtitan", ("seq_len", "8192"))
    long = [one for one in found if not one.fitted]
    assert [one.run.row["cp"] for one in long] == ["1", "2", "4", "8"]
    errors = [abs(one.error) for one in long]
    assert max(errors) <= 0.2 and sum(errors) / len(errors) <= 0.12
    assert not any(one.constants.at_bounds for one in found)


@pytest.mark.shows(142)
@pytest.mark.parametrize("source", ["NeMo docs", "Megatron-Bridge", "MegaScale", "2407.21783", "torchtitan"])
def test_layouts_of_one_source_come_in_the_measured_order(source: str):
    for group, own in by_group(predicted(source)).items():
        found = summary(group, own)
        assert found["runs"] >= 3 and found["rank_correlation"] >= 0.9, group
        assert found["too_big"] == 0, group


def test_a_run_is_not_predicted_by_constants_fitted_on_itself():
    runs = [run for run in read_runs(RUNS)[0] if "MegaScale" in run.row["source"]]
    before = predict_runs(runs)
    slow = [type(run)(**{**vars(run), "measured_s": 3 * run.measured_s}) if run is runs[2] else run for run in runs]
    after = predict_runs(slow)
    assert after[2].predicted_s == before[2].predicted_s
    assert any(a.predicted_s != b.predicted_s for a, b in zip(after, before, strict=True))


def test_slopes_are_taken_anew_where_the_first_are_flat():
    # The products of its one run hide behind tensor-parallel messages unless they are slow.
    found = predicted("torchtitan", ("schedule", "1F1B"))
    fitted = [one for one in found if one.fitted]
    assert len(fitted) == 1 and abs(fitted[0].error) < 0.01
    assert sum(abs(one.error) for one in found) / len(found) < 0.4


def test_no_run_that_filled_its_devices_is_called_too_big():
    largest = [run for run in read_runs(RUNS)[0] if run.row["model"] == "LLAMA3_70B" and "GB300" in run.row["hardware"]]
    assert max(run.peak_bytes() / run.memory_bytes() for run in largest) == pytest.approx(0.92, abs=0.04)


def test_rows_that_lack_something_are_named_with_the_reason():
    runs, others = read_runs(RUNS)
    assert len(runs) + len(others) == 318
    assert len(runs) >= 250 and all(reason for _, reason in others)
    assert sum(isinstance(run, TimedRun) for run in runs) == 36


def test_bad_input_is_refused(tmp_path: Path):
    runs, _ = read_runs(RUNS)
    with pytest.raises(ValueError, match="no column is called 'shedule'; did you mean 'schedule'"):
        predict_runs(runs[:1], [("shedule", "1F1B")])
    with pytest.raises(ValueError, match="no run that can be predicted has schedule = nothing"):
        predict_runs(runs[:1], [("schedule", "nothing")])
    empty = tmp_path / "runs.csv"
    empty.write_text("source,where\n")
    with pytest.raises(ValueError, match=r"has no run; a table of runs has a row for each"):
        read_runs(empty)
    empty.write_text("model,gpus\nllama3-8b,8\n")
    with pytest.raises(ValueError, match="has no column source"):
        read_runs(empty)
    with pytest.raises(ValueError, match=r"cannot be read: no such file"):
        read_runs(tmp_path / "missing.csv")


def test_each_style_changes_what_is_predicted(tmp_path: Path):
    rows = list(csv.DictReader(RUNS.open(newline="")))
    assert {row["style"] for row in rows} == set(STYLES)
    row = next(one for one in rows if one["style"] == "compiled, AsyncTP" and one["seq_len"])
    path = tmp_path / "runs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, row)
        writer.writeheader()
        writer.writerows(row | {"style": style, "recompute": "none"} for style in STYLES)
    runs, _ = read_runs(path)
    assert len({(run.predict(Constants()), run.peak_bytes()) for run in runs}) == len(runs) == len(STYLES)

"""A run's folder and what it tells: whose it is, one writer at a time, metrics that continue where a run does."""

import io
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.output import Progress, duration
from penstock.cli.processes.meeting import find_group
from penstock.engine.folders.runs import (
    METRICS_FILE,
    RUN_FILE,
    TENSORBOARD_FOLDER,
    MetricsLog,
    RunLock,
    check_folder,
    read_metrics,
)
from penstock.settings import ConfigError, RunConfig, from_dict, read_config
from tests.full_disk import full_disk


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def configured(tmp_path: Path) -> Callable[..., RunConfig]:
    def make(**train: Any) -> RunConfig:
        return from_dict({"output": str(tmp_path / "run"), "train": train})

    return make


def test_a_folder_is_continued_by_the_same_run(configured: Callable[..., RunConfig]):
    assert not check_folder(configured())
    folder = RunLock(configured())
    assert not folder.continued
    folder.close()
    assert check_folder(configured())
    folder = RunLock(configured())
    assert folder.continued
    assert read_config(folder.path / RUN_FILE) == configured()
    folder.close()


@pytest.mark.shows(148)
@pytest.mark.parametrize(
    "text", ["\U0001f980 & caf\u00e9", 'a "quoted" \\ name', "tab\tand\nline", "\x1b\x7f", "# = []"]
)
def test_settings_of_any_text_read_back_as_they_were(text: str, tmp_path: Path):
    config = from_dict({"output": str(tmp_path / "run"), "data": {"corpus": text}})
    RunLock(config).close()
    assert read_config(tmp_path / "run" / RUN_FILE) == config
    assert check_folder(config)


@pytest.mark.parametrize(
    "entries, last, every, is_lost",
    [
        # A first start that ended before a checkpoint was there.
        ([], None, 2, False),
        (["run.json"], None, 2, False),
        (["run.json"], 1, 2, False),
        (["run.json", ".saving-step-00000002"], 4, 2, False),
        (["run.json"], 9, 0, False),
        # A checkpoint, also one that is just being replaced.
        (["run.json", "step-00000008"], 9, 2, False),
        (["run.json", ".replaced-step-00000008"], 9, 2, False),
        # Removed, emptied, or on a disk that is not there.
        (None, 5, 2, True),
        ([], 5, 2, True),
        (["run.json"], 5, 2, True),
    ],
)
def test_a_run_that_has_lost_its_checkpoints_is_not_started_anew(
    entries: list[str] | None, last: int | None, every: int, is_lost: bool, tmp_path: Path
):
    config = from_dict({"output": str(tmp_path / "run"), "checkpoint": {"every": every}})
    RunLock(config).close()
    if entries is not None:
        (tmp_path / "run" / "checkpoints").mkdir()
    for entry in entries or []:
        (tmp_path / "run" / "checkpoints" / entry).mkdir()
    if last is not None:
        log = MetricsLog(tmp_path / "run")
        for step in range(1, last + 1):
            log.write(step, {"loss": 1.0})
        log.close()
    before = files_of(tmp_path)
    for attempt in (check_folder, RunLock):
        if is_lost:
            with pytest.raises(ConfigError, match=rf"has steps up to {last}; bring the folder back"):
                attempt(config)
            assert files_of(tmp_path) == before
        else:
            opened = attempt(config)
            if isinstance(opened, RunLock):
                opened.close()


def test_a_folder_of_another_run_is_refused_and_left_alone(configured: Callable[..., RunConfig], tmp_path: Path):
    RunLock(configured(seed=1)).close()
    before = files_of(tmp_path)
    assert before
    for attempt in (check_folder, RunLock):
        with pytest.raises(ConfigError, match=r"holds another run: train.seed \(2 here, 1 there\); give another"):
            attempt(configured(seed=2))
    with pytest.raises(ConfigError, match="already holds a run; --fresh takes another"):
        check_folder(configured(seed=1), fresh=True)
    assert files_of(tmp_path) == before


def test_a_folder_of_strangers_is_refused_and_left_alone(configured: Callable[..., RunConfig], tmp_path: Path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds 'thesis.tex' and no run"):
        RunLock(configured())
    assert files_of(tmp_path) == {"run/thesis.tex": b"mine"}
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        RunLock(from_dict({"output": str(tmp_path / "run" / "thesis.tex")}))


@pytest.mark.shows(147)
def test_what_a_first_start_left_unfinished_does_not_block_the_folder(
    configured: Callable[..., RunConfig], tmp_path: Path
):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.toml.new").write_text('output = "')
    (tmp_path / "run" / ".lock").touch()
    assert not check_folder(configured())
    RunLock(configured()).close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "run.toml"]


@pytest.mark.shows(147)
def test_a_full_disk_at_the_start_is_one_sentence_and_blocks_nothing(
    configured: Callable[..., RunConfig], tmp_path: Path
):
    with full_disk(), pytest.raises(ConfigError) as caught:
        RunLock(configured())
    assert re.fullmatch(rf"{tmp_path}/run/run\.toml cannot be written: [^\n]+", str(caught.value))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock"]
    RunLock(configured()).close()
    with full_disk(), pytest.raises(OSError, match=r"run/metrics\.jsonl"):
        MetricsLog(tmp_path / "run").write(1, {"loss": 1.0})
    assert check_folder(configured())


def test_two_runs_do_not_write_at_once(configured: Callable[..., RunConfig]):
    folder = RunLock(configured())
    with pytest.raises(ConfigError, match="is being written by another run"):
        RunLock(configured())
    folder.close()
    RunLock(configured()).close()


def test_metrics_continue_where_the_run_does(tmp_path: Path):
    log = MetricsLog(tmp_path)
    for step in range(1, 8):
        log.write(step, {"loss": 1 / step, "grad_norm": math.nan})
    log.close()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 8, "lo')
    assert [entry["step"] for entry in read_metrics(tmp_path / METRICS_FILE)] == list(range(1, 8))
    log = MetricsLog(tmp_path, resumed_step=5)
    log.write(6, {"loss": 0.25})
    log.close()
    entries = read_metrics(tmp_path / METRICS_FILE)
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    assert [entry["loss"] for entry in entries] == [1 / step for step in range(1, 6)] + [0.25]
    assert entries[0]["grad_norm"] is None, "JSON has no NaN"


def test_a_resumed_run_keeps_what_a_user_has_added(tmp_path: Path):
    kept = ['{"step": 1, "loss": 2.5, "note": "my remark \u00e9"}', '{"note": "between"}', '{"step": 2, "loss": NaN}']
    path = tmp_path / METRICS_FILE
    path.write_text("\n".join([*kept[:2], "no JSON", '{"step": "x"}', kept[2], '{"step": 3}', '{"step": 2, "lo']))
    assert read_metrics(path)[0] == {"step": 1, "loss": 2.5, "note": "my remark \u00e9"}
    MetricsLog(tmp_path, resumed_step=2).close()
    assert path.read_text().splitlines() == kept
    MetricsLog(tmp_path, resumed_step=1).close()
    assert path.read_text().splitlines() == kept[:2]


def test_metrics_are_written_for_tensorboard_too(tmp_path: Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = MetricsLog(tmp_path, tensorboard=True)
    for step in (1, 2):
        log.write(step, {"loss": 1.5 * step})
    log.close()
    found = EventAccumulator(str(tmp_path / TENSORBOARD_FOLDER)).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 1.5), (2, 3.0)]


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "node[03-07,9],other",
}


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, None),
        (TORCHRUN, (3, 4, 1, "a", 29500)),
        ({key: value for key, value in TORCHRUN.items() if key != "LOCAL_RANK"}, (3, 4, 0, "a", 29500)),
        (SLURM, (5, 8, 1, "node03", 20000 + 123456 % 20000)),
        (SLURM | {"SLURM_STEP_NODELIST": "solo"}, (5, 8, 1, "solo", 23456)),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu-a,gpu-b"}, (5, 8, 1, "gpu-a", 23456)),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1,4]-ib"}, (5, 8, 1, "n1-ib", 23456)),
        (SLURM | {"MASTER_ADDR": "head", "MASTER_PORT": "9"}, (5, 8, 1, "head", 9)),
        (SLURM | TORCHRUN, (3, 4, 1, "a", 29500)),
    ],
)
def test_the_group_a_process_was_started_in_is_found(environ: dict[str, str], expected: tuple[Any, ...] | None):
    group = find_group(environ)
    found = group and (group.rank, group.world_size, group.local_rank, group.address, group.port)
    assert found == expected


def test_progress_in_a_file_tells_loss_speed_idle_time_and_time_left():
    clock = iter([0.0, 0.0, 1.0, 2.5, 2.6])
    file = io.StringIO()
    progress = Progress(4, 0, file, clock=lambda: next(clock))
    for step in range(1, 5):
        taken: Any = SimpleNamespace(step=step, loss=2.5, num_tokens=1000, step_time_s=0.5, idle_share=0.125)
        progress.step(taken)
    progress.note(4, "validation loss 1.25")
    assert file.getvalue().splitlines() == [
        "step 1/4  loss 2.5000  2,000 tokens/s  idle 12.5%  0:02 left",
        "step 3/4  loss 2.5000  2,000 tokens/s  idle 12.5%  0:00 left",
        "step 4/4  loss 2.5000  2,000 tokens/s  idle 12.5%  0:00 left",
        "step 4/4  validation loss 1.25",
    ]


@pytest.mark.parametrize(
    "seconds, text", [(0, "0:00"), (5.4, "0:05"), (125, "2:05"), (3599.6, "1h00"), (11220, "3h07")]
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text

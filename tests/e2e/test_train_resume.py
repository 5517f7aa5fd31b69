"""A run that is killed, stopped or robbed of its checkpoints continues with the numbers of one that was not."""

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.e2e.training import Ended, Started, exact_metrics, has_saved, last_step, run, wait_until, write_run

STEPS = 80
ALL_RANKS = [0, 1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Iterator[Path]:
    """The folder of a run of all steps on two ranks that nothing has interrupted."""
    ended = run(str(write_run(folder, "reference", STEPS)))
    assert ended.exit_code == 0, ended.err
    assert last_step(folder / "reference") == STEPS
    yield folder / "reference"


def checkpoints(output: Path) -> list[Path]:
    return sorted((output / "checkpoints").glob("step-*"))


def resumed_from(ended: Ended) -> int:
    found = re.search(r"after step (\d+)", ended.out)
    return int(found[1]) if found else 0


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


@pytest.mark.shows(96, 97)
def test_a_run_ended_in_every_way_continues_bit_for_bit(folder: Path, reference: Path):
    file, output = str(write_run(folder, "ended", STEPS)), folder / "ended"
    expected = exact_metrics(reference)
    assert len(expected) > 5 * STEPS

    def is_as_expected() -> None:
        told = exact_metrics(output)
        assert told
        assert told == {key: value for key, value in expected.items() if key in told}

    # SIGKILL of one rank: the other says what it waits for, and the command fails.
    with Started([file]) as started:
        wait_until(lambda: last_step(output) >= 12 and has_saved(output, 10), started)
        started.signal(signal.SIGKILL, ranks=[1])
        ended = started.end()
    assert ended.exit_code == 1
    assert re.search(r"rank 1 \(process \d+\) was killed by SIGKILL; the same command continues", ended.err), ended.err
    assert re.search(r"process 0: rank 0, step \d+: .*(from rank 1|by peer)", ended.err), ended.err
    assert "Traceback" not in ended.err
    is_as_expected()

    # SIGTERM to the command, which had continued from the newest checkpoint.
    saved = step_of(checkpoints(output)[-1])
    assert saved >= 10
    with Started([file]) as started:
        wait_until(lambda: last_step(output) >= saved + 8, started)
        started.signal(signal.SIGTERM)
        ended = started.end()
    assert ended.exit_code == 128 + signal.SIGTERM, ended.err
    assert resumed_from(ended) == saved
    stopped_at = last_step(output)
    assert f"stopped after step {stopped_at} and saved" in ended.out
    assert step_of(checkpoints(output)[-1]) == stopped_at
    is_as_expected()

    # SIGKILL of everything while a checkpoint is half written.
    def is_caught_writing() -> bool:
        started.hold(ALL_RANKS)
        if list((output / "checkpoints").glob(".saving-*")):
            return True
        started.signal(signal.SIGCONT, ranks=ALL_RANKS)
        return False

    with Started([file, "--checkpoint.every", "1"]) as started:
        wait_until(lambda: last_step(output) >= stopped_at + 1, started)
        wait_until(is_caught_writing, started)
        before = checkpoints(output)
        started.kill()
        ended = started.end()
    assert ended.exit_code == -signal.SIGKILL
    assert checkpoints(output) == before
    assert list((output / "checkpoints").glob(".saving-*"))
    is_as_expected()

    # The newest checkpoint is cut short; then SIGTERM reaches a single rank.
    newest, one_before = before[-1], before[-2]
    tensors = next(newest.glob("*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with Started([file]) as started:
        wait_until(lambda: last_step(output) >= step_of(newest) + 4, started)
        started.signal(signal.SIGTERM, ranks=[1])
        ended = started.end()
    assert ended.exit_code == 128 + signal.SIGTERM, ended.err
    assert resumed_from(ended) == step_of(one_before)
    assert str(newest) in ended.err and "refused" in ended.err
    stopped_at = last_step(output)
    assert stopped_at < STEPS
    is_as_expected()

    # One byte of the newest checkpoint is altered; the rest of the run passes undisturbed.
    newest, one_before = checkpoints(output)[-1], checkpoints(output)[-2]
    assert step_of(newest) == stopped_at
    tensors = next(newest.glob("*.safetensors"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    ended = run(file)
    assert ended.exit_code == 0, ended.err
    assert resumed_from(ended) == step_of(one_before)
    assert str(newest) in ended.err and "refused" in ended.err
    assert exact_metrics(output) == expected


@pytest.mark.shows(96)
def test_a_run_continues_on_another_number_of_ranks_bit_for_bit(
    folder: Path, reference: Path, capsys: pytest.CaptureFixture[str]
):
    output = folder / "moved"
    shutil.copytree(reference, output)
    newest = checkpoints(output)[5]
    for later in checkpoints(output)[6:]:
        shutil.rmtree(later)
    file = write_run(folder, "moved", STEPS)
    assert main(["train", str(file), "--parallel.pp", "1", "--schedule.name", "afab"]) == 0
    assert f"after step {step_of(newest)}" in capsys.readouterr().out
    assert exact_metrics(output) == exact_metrics(reference)


def test_a_finished_run_has_nothing_left_to_do(folder: Path, reference: Path, capsys: pytest.CaptureFixture[str]):
    before = (reference / "metrics.jsonl").read_bytes()
    file = write_run(folder, "reference", STEPS)
    assert main(["train", str(file), "--parallel.pp", "1"]) == 0
    assert f"done after step {STEPS}, validation loss" in capsys.readouterr().out
    assert (reference / "metrics.jsonl").read_bytes() == before

"""`penstock trace` on a run of two ranks: the step is told in full and drawn in every form, over no other file."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.draw import ENDINGS
from penstock.draw.layers import RECORDED_STEP_FILE, read_recorded_step
from penstock.schedule.actions import COMPUTE, parts
from tests.e2e.training import Started, write_run

MICROBATCHES = 4


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trace")
    run_file = write_run(folder, "run", steps=6)
    with Started([str(run_file), "--log.timeline", "True"]) as started:
        ended = started.end()
    assert ended.exit_code == 0, ended.err
    return folder / "run"


@pytest.fixture
def trace(capsys: pytest.CaptureFixture[str]):
    """Run `penstock trace`; gives its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["trace", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_a_run_records_its_last_step_in_full(run_folder: Path):
    recorded = read_recorded_step(run_folder / RECORDED_STEP_FILE)
    assert recorded.recording.step == 6
    assert recorded.simulated is not None
    for timeline in (recorded.recording.timeline, recorded.simulated):
        for rank, events in enumerate(timeline.events):
            actions = [str(e.action) for e in events if parts(e.action)[0].op in COMPUTE]
            ops = "FIW" if rank else "FB"  # a gradient leaves the last rank before those of its weights are computed
            assert sorted(actions) == sorted(f"{rank}{op}{m}" for op in ops for m in range(MICROBATCHES))
    for rank, spans in enumerate(recorded.recording.spans):
        transfers = [str(s.action) for s in spans if "SEND" in str(s.action) or "RECV" in str(s.action)]
        assert len(transfers) == 2 * MICROBATCHES
        # Two ranks: each waits for the other alone, once a message.
        assert [wait.rank for span in spans for wait in span.waits] == [1 - rank] * MICROBATCHES


def test_where_the_time_went_is_all_of_it(run_folder: Path, trace):
    code, out, _ = trace(run_folder, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["step"], told["unit"], len(told["ranks"])) == (6, "ms", 2)
    assert told["simulated_makespan"] > 0
    for rank, spent in enumerate(told["ranks"]):
        assert list(spent["waiting"]) == [str(1 - rank)]
        parts = [value for name, value in spent.items() if name != "waiting"] + list(spent["waiting"].values())
        assert sum(parts) == pytest.approx(told["makespan"])
        # Nothing is negative but for the rounding of the file to a nanosecond.
        assert min(parts) > -1e-4
        assert spent["compute"] > 0
        assert spent["step"] > 0


def test_the_terminal_gets_a_picture_and_a_table(run_folder: Path, trace):
    code, out, _ = trace(run_folder)
    assert code == 0
    assert "1f1b, 2 ranks, measured in step 6" in out
    assert max(map(len, out.splitlines())) <= 80
    rows = re.findall(r"^ +([01])((?: +[\d.]+ +\d+%){7})$", out, re.MULTILINE)
    assert [rank for rank, _ in rows] == ["0", "1"]
    for _, row in rows:
        shares = [int(share) for share in re.findall(r"(\d+)%", row)]
        assert abs(sum(shares) - 100) <= len(shares) / 2  # each is rounded
    assert re.search(r"^ +0  rank 1 [\d.]+ ms \(\d+%\)$", out, re.MULTILINE)
    assert "simulated" not in out
    _, out, _ = trace(run_folder / RECORDED_STEP_FILE, "--simulated")
    assert out.index("simulated") < out.index("measured")


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_form_is_drawn_and_none_over_another_file(run_folder: Path, trace, ending: str, tmp_path: Path):
    path = tmp_path / f"step{ending}"
    code, out, _ = trace(run_folder, "--output", path)
    assert code == 0
    assert str(path) in out
    before = path.read_bytes()
    for name in ("simulated", "measured"):
        assert ending in (".png", ".pdf") or name.encode() in before
    code, out, err = trace(run_folder, "--output", path)
    assert (code, out) == (2, "")
    assert str(path) in err
    assert "--force" in err
    assert path.read_bytes() == before
    assert trace(run_folder, "--output", path, "--force")[0] == 0

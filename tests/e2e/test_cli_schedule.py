"""`penstock schedule`: what it prints, what it writes, and how it refuses."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import schedule
from penstock.cli.main import main
from tests.schedule.hangs import LOOKS_FINE

PUBLISHED = ["--forward", "29.718", "--backward-input", "29.444", "--backward-weight", "19.927", "--transfer", "0.527"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    """Run `penstock schedule` with the given arguments; gives its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        code = main(["schedule", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def assert_refused(result: tuple[int, str, str], *words: str) -> None:
    """Exit code 2 and one sentence that holds the given words; nothing on stdout."""
    code, out, err = result
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1
    assert re.match(r"penstock( schedule( \w+)?)?(:| )", err)
    for word in words:
        assert word in err


def test_the_installed_command_answers():
    command = Path(sys.executable).with_name("penstock")
    done = subprocess.run([command, "schedule", "list"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    named = [line.split()[0] for line in done.stdout.splitlines() if not line.startswith(" ")]
    assert named == list(schedule.names())


def test_list_has_a_sentence_for_each_schedule(run):
    code, out, _ = run("list", "--json")
    entries = json.loads(out)
    assert code == 0
    assert [entry["name"] for entry in entries] == list(schedule.names())
    assert all(entry["summary"] for entry in entries)


def test_simulate_prints_the_published_bubble(run):
    code, out, _ = run("simulate", "1f1b", "--ranks", 8, "--microbatches", 24, *PUBLISHED, "--json")
    figures = json.loads(out)
    assert code == 0
    assert round(figures["bubble_rate"], 4) == 0.2347
    assert figures["peak_live_microbatches"] == [8, 7, 6, 5, 4, 3, 2, 1]
    # In words the two have the names that drawings and pages give them.
    _, words, _ = run("simulate", "1f1b", "--ranks", 8, "--microbatches", 24, *PUBLISHED)
    assert words.splitlines()[2:4] == [f"  span         {figures['span_cost']:.6g}", "  bubble       0.2347"]
    work = 24 * (29.718 + 29.444 + 19.927)
    assert figures["bubble_rate"] == pytest.approx(1 - work / figures["span_cost"], abs=1e-12)
    assert figures["makespan"] >= figures["span_cost"]


@pytest.mark.parametrize("ending", ["svg", "png", "html", "json"])
def test_show_draws_into_a_file_and_never_over_another(run, tmp_path: Path, ending: str):
    path = tmp_path / f"picture.{ending}"
    assert run("show", "afab", "--output", path)[0] == 0
    before = path.read_bytes()
    assert before and (ending in ("svg", "png") or f"show afab --output {path}".encode() in before)
    assert_refused(run("show", "1f1b", "--output", path), str(path), "--force")
    assert path.read_bytes() == before
    assert run("show", "1f1b", "--output", path, "--force")[0] == 0
    assert path.read_bytes() != before


def test_export_refuses_what_it_cannot_write(run, tmp_path: Path):
    taken = tmp_path / "mine.csv"
    taken.write_text("mine")
    assert_refused(run("export", "1f1b", "--output", taken), str(taken), "--force")
    assert taken.read_text() == "mine"
    assert_refused(run("export", "1f1b", "--output", tmp_path / "a.xlsx"), "a.xlsx", ".csv", ".txt")
    assert_refused(run("export", "1f1b", "--output", tmp_path / "nowhere" / "a.csv"), "nowhere")
    assert_refused(run("export", "1f1b"), "--output")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.csv"]


@pytest.mark.parametrize("name, own", [("1f1b", []), ("interleaved", ["--stages-per-rank", 3]), ("zb-v", [])])
def test_verify_proves_a_name_at_a_size_as_what_export_writes(run, tmp_path: Path, name: str, own: list[object]):
    size = ["--ranks", 3, "--microbatches", 7, *own]
    assert run("export", name, *size, "--output", tmp_path / "a.txt")[0] == 0
    _, from_file, _ = run("verify", tmp_path / "a.txt", "--json")
    code, by_name, _ = run("verify", name, *size, "--json")
    proof = json.loads(by_name)
    assert code == 0 and {"ranks": 3, "microbatches": 7}.items() <= proof.items() and proof["schedule"] == name
    wanted = json.loads(from_file)
    assert wanted.pop("file") == str(tmp_path / "a.txt") and {key: proof[key] for key in wanted} == wanted
    code, words, _ = run("verify", name, *size)
    assert code == 0 and words.startswith(f"{name}: proved\n  {proof['num_actions']} actions on 3 ranks")
    assert_refused(run("verify", tmp_path / "a.txt", "--ranks", 4), "has 3 ranks, not 4")


def test_verify_says_why_a_function_s_order_cannot_run(run, tmp_path: Path):
    (tmp_path / "own.py").write_text(
        "from dataclasses import replace\nfrom penstock import schedule\n"
        "def late(ranks, microbatches):\n"
        "    built = schedule.build('1f1b', ranks=ranks, microbatches=microbatches)\n"
        "    return replace(built, orders=(built.orders[0], built.orders[1][::-1]))\n"
    )
    name = f"{tmp_path / 'own.py'}:late"
    code, out, err = run("verify", name, "--ranks", 2, "--microbatches", 2, "--json")
    assert code == 2 and json.loads(out)["proved"] is False and json.loads(out)["schedule"] == name
    assert "rank 1" in err and json.loads(out)["reason"] in err


@pytest.mark.shows(192)
def test_show_draws_what_hangs_and_is_refused_all_the_same(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("order.csv").write_text(LOOKS_FINE)
    Path("own.py").write_text(
        "from penstock.schedule import Program, build, from_csv\n"
        "def order(ranks, microbatches):\n"
        "    return from_csv('0F0,0B0,0F1,0B1\\n1F1,1F0,1B0,1B1\\n')\n"
    )
    for name, word in (("order.csv", "0SEND_F1 waits for 1RECV_F1"), ("own.py:order", "0B0 waits for 1SEND_B0")):
        sizes = () if name == "order.csv" else ("--ranks", 2, "--microbatches", 2)
        code, out, err = run("show", name, *sizes)
        assert code == 2 and f"{word} of rank 1" in out and "up to where it hangs" in out
        assert err.count("\n") == 1 and "deadlock, if sends wait for their receives: rank" in err
        for ending in ("svg", "png", "html", "json"):
            code, out, again = run("show", name, *sizes, "--output", f"hang.{ending}", "--force")
            assert (code, again) == (2, err) and out.endswith(f"into hang.{ending}\n")
        told = json.loads(run("show", name, *sizes, "--json")[1])
        assert told["proved"] is False and told["reason"] in err and sorted(told["arrows"]) == [[0, 1], [1, 0]]
        assert [wait["of_rank"] for wait in told["waits"]] == [1, 0] and len(told["events"]) == 2
    # Another file is not overwritten.
    code, out, err = run("show", "order.csv", "--output", "hang.svg")
    assert code == 2 and out == "" and "deadlock" not in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["shw", "1f1b"], ["'shw'", "'show'"]),
        (["show", "1f1"], ["'1f1'", "1f1b"]),
        (["show", "1f1b", "--rank", "4"], ["'--rank'", "'--ranks'"]),
        (["show", "1f1b", "--ranks", "four"], ["--ranks", "four"]),
        (["show", "1f1b", "--ranks", "0"], ["ranks", "0"]),
        (["show", "1f1b", "--microbatches", "-3"], ["microbatches", "-3"]),
        (["show", "1f1b", "extra"], ["'extra'"]),
        (["show"], ["NAME"]),
        (["simulate", "1f1b", "--forward", "-1"], ["forward", "-1"]),
        (["simulate", "1f1b", "--transfer", "nan"], ["transfer", "nan"]),
        (["simulate", "1f1b", "--stages-per-rank", "2"], ["1f1b", "2"]),
        (["verify", "no-such-file.csv"], ["no-such-file.csv", "no such file"]),
        (["--json"], ["--json", "list"]),
    ],
)
def test_mistakes_get_one_sentence(run, arguments: list[str], words: list[str]):
    assert_refused(run(*arguments), *words)


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert main(["tran"]) == 2
    assert "'train'" in capsys.readouterr().err


def test_compare_lists_every_schedule_that_trains_with_the_least_bubble_first(run):
    options = ["--ranks", 4, "--microbatches", 8, "--message-bytes", 1000, "--microbatch-bytes", 10]
    code, out, err = run("compare", *options, "--json")
    assert code == 0, err
    rows = json.loads(out)
    assert {row["schedule"] for row in rows} == set(schedule.names()) - {"inference"}
    assert [row["bubble_rate"] for row in rows] == sorted(row["bubble_rate"] for row in rows)
    figures = {row["schedule"]: row for row in rows}
    assert figures["1f1b"]["bubble_rate"] == pytest.approx(3 / 11)
    assert figures["1f1b"]["peak_live_microbatches"] == 4 and figures["1f1b"]["peak_live_bytes"] == 40
    assert figures["1f1b"]["num_messages"] == 2 * 3 * 8 and figures["1f1b"]["message_bytes"] == 48000
    assert figures["interleaved"]["num_messages"] == 2 * 7 * 8
    assert figures["zb-v"]["bubble_rate"] == 0
    code, out, _ = run("compare", *options)
    assert code == 0
    header, *lines = out.splitlines()
    assert header.split()[0] == "schedule" and "bytes sent" in header
    assert [line.split()[0] for line in lines] == [row["schedule"] for row in rows]


def test_simulate_says_what_the_step_waits_for_and_what_is_live(run):
    sizes = ["--ranks", 2, "--microbatches", 2]
    code, out, _ = run("simulate", "1f1b", *sizes, "--forward", "1,3", "--microbatch-bytes", 7, "--json")
    figures = json.loads(out)
    assert code == 0
    assert figures["live_microbatches"][1] == [[1, 1], [6, 1], [11, 0]]
    assert figures["live_bytes"][0][0] == [0, 7]
    assert_refused(run("simulate", "1f1b", *sizes, "--forward", "1,2,3"), "forward", "2 stages", "3")
    assert_refused(run("simulate", "1f1b", *sizes, "--forward", "1,x"), "--forward", "'1,x'")
    assert_refused(run("simulate", "1f1b", *sizes, "--lengths", "1,2,3"), "2 microbatches", "3")


def test_gradients_may_leave_early(run):
    bubbles = []
    for flag in ([], ["--early-gradients"]):
        code, out, _ = run("simulate", "1f1b", "--ranks", 4, "--microbatches", 8, "--json", *flag)
        assert code == 0
        bubbles.append(json.loads(out)["bubble_rate"])
    # F, I and W take 1 each: of the p - 1 times all three at both ends the W are gone.
    assert bubbles == pytest.approx([9 / 33, 6 / 30])


def test_a_file_is_taken_as_it_is(run, tmp_path: Path):
    file = tmp_path / "mine.csv"
    assert run("export", "1f1b", "--output", file)[0] == 0
    assert_refused(run("simulate", file, "--early-gradients"), "--early-gradients goes with a schedule's name")

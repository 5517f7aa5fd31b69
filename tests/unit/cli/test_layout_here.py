"""The layout that a command takes where none is given: threads, copies, stages, or a refusal."""

from pathlib import Path

import pytest

from penstock.cli.main import main
from penstock.cli.models import serve
from penstock.cli.processes.machine import Machine, fitted, options_here
from penstock.engine.folders.model_folder import open_model
from penstock.settings import Precision, Quantize
from tests.e2e.training import write_run
from tests.hugging_face import make_model

GIB = 2**30
MILLIONS = 1_000_000


@pytest.mark.parametrize("weight_bytes", [28 * MILLIONS, 111 * MILLIONS, 1300 * MILLIONS])
@pytest.mark.parametrize("num_sequences", [1, 8, 500])
def test_two_cores_read_the_weights_together(weight_bytes: int, num_sequences: int) -> None:
    assert fitted(weight_bytes, num_sequences, 50, 10**6, Machine(2, 24 * GIB)) == (1, 1, 2)


@pytest.mark.parametrize("num_cores", [2, 64])
@pytest.mark.parametrize("max_copies", [1, 10**6])
def test_a_model_that_is_read_in_no_time_has_one_thread(num_cores: int, max_copies: int) -> None:
    machine = Machine(num_cores, 24 * GIB)
    for num_bytes, num_threads in ((4 * 2**20, 1), (16 * 2**20, 1), (64 * 2**20, num_cores)):
        assert fitted(num_bytes, 8, 50, max_copies, machine) == (1, 1, num_threads)
    assert fitted(4 * 2**20, 100_000, 50, max_copies, machine)[2] == 1, "whatever the copies"


def test_what_is_chosen_is_said_wherever_there_is_a_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make_model("llama", vocab_size=300).save_pretrained(tmp_path)
    model = open_model(tmp_path)
    for num_cores, told in (("1", ""), ("2", "penstock: --pp 1 --threads 1 fits this machine")):
        monkeypatch.setenv("OMP_NUM_THREADS", num_cores)
        assert options_here(model, 8, 8, "cpu") == ["--pp", "1", "--threads", "1"]
        err = capsys.readouterr().err
        assert err.startswith(told) and bool(err) == bool(told)


def test_many_cores_take_copies_for_much_work_alone() -> None:
    machine = Machine(64, 512 * GIB)
    assert fitted(111 * MILLIONS, 5000, 50, 5000, machine) == (1, 8, 8)
    assert fitted(111 * MILLIONS, 100, 50, 100, machine) == (1, 1, 64), "little work: nothing is started"
    assert fitted(111 * MILLIONS, 5000, 50, 1, machine) == (1, 1, 64), "a server has no copies"


def test_copies_fit_the_memory() -> None:
    assert fitted(30 * 10**9, 5000, 50, 5000, Machine(64, 80 * GIB)) == (1, 2, 32)


@pytest.mark.parametrize(
    ("weight_bytes", "num_gpus", "num_sequences", "expected"),
    [
        (14e9, 1, 500, (1, 1, 1)),
        (14e9, 4, 500, (1, 4, 1)),
        (14e9, 4, 8, (1, 1, 1)),
        (140e9, 4, 500, (2, 2, 1)),
        (140e9, 2, 500, (2, 1, 1)),
        (280e9, 8, 500, (4, 2, 1)),
    ],
)
def test_gpus_take_stages_where_one_is_too_small_and_copies_where_there_is_work(
    weight_bytes: float, num_gpus: int, num_sequences: int, expected: tuple[int, int, int]
) -> None:
    machine = Machine(64, 512 * GIB, num_gpus, 80 * GIB)
    assert fitted(int(weight_bytes), num_sequences, 50, 10**6, machine) == expected


@pytest.mark.parametrize("machine", [Machine(8, 16 * GIB), Machine(8, 512 * GIB, 2, 80 * GIB)])
def test_a_model_that_does_not_fit_is_refused_with_what_would_do(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"the model takes 312\.\d GiB.*--quantize int8.*torchrun"):
        fitted(280 * 10**9, 8, 50, 8, machine)


def test_one_option_of_the_layout_is_enough_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, chooses in (([], True), (["--pp", "1"], False), (["--threads", "1"], False)):
        asked: list[str] = []
        with monkeypatch.context() as patch:
            patch.setattr(serve.Serve, "fit", lambda self, asked=asked: asked.append("fit") or ["--pp", "1"])
            patch.setattr("penstock.cli.processes.session.work_together", lambda *given: 0)
            assert serve.Serve(["model", *words]).run() == 0
        assert bool(asked) == chooses
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Machine.here("cpu").num_cores == 3


def test_a_models_bytes_are_those_of_the_numbers_that_it_is_used_in(tmp_path: Path) -> None:
    make_model("llama", vocab_size=300).save_pretrained(tmp_path / "foreign")
    run = tmp_path / "run"
    assert main(["train", str(write_run(tmp_path, "run", 10)), "--parallel.pp", "1"]) == 0
    for folder in (tmp_path / "foreign", run):
        plain = open_model(folder).weight_bytes()
        assert plain > 10_000
        assert open_model(folder, precision=Precision.BF16).weight_bytes() == plain // 2
        assert plain // 4 <= open_model(folder, quantize=Quantize.INT8).weight_bytes() < 0.3 * plain


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_help_gives_no_default_for_what_is_chosen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    lines = capsys.readouterr().out.splitlines()
    chosen = [line for line in lines if line.split()[:1] in (["--pp"], ["--threads"], ["--dp"])]
    assert len(chosen) >= 2 and not any("default" in line for line in chosen)
    assert "as fits this machine" in "\n".join(lines)

"""The report on a GPU says what was found, and a machine without one says so."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import gpu_report  # pyright: ignore[reportMissingImports]

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="test_one" time="1.25"/>
<testcase classname="tests.gpu.test_a" name="test_two" time="0.5">
<failure message="assert 1 == 2&#10;more">x</failure></testcase>
<testcase classname="tests.gpu.test_b" name="test_three" time="0"><skipped message="needs | two GPUs"/></testcase>
</testsuite></testsuites>"""


def test_without_a_gpu_one_sentence_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_report.main(["--out", str(tmp_path / "report.md")]) == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("no GPU is used here") and not list(tmp_path.iterdir())


def test_a_failure_is_in_the_report_and_in_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_report, "environment", lambda: {"nvidia-smi": "one of them"})
    monkeypatch.setattr(gpu_report, "run_benchmark", lambda: {"graphs_over_live_rows": 1.5})
    path = tmp_path / "report.md"
    for results, code in ((gpu_report.read_results(RESULTS), 1), (gpu_report.read_results(RESULTS)[:1], 0), ([], 1)):
        monkeypatch.setattr(gpu_report, "run_tests", lambda results=results: results)
        assert gpu_report.main(["--out", str(path)]) == code
        if len(results) == 3:
            text = path.read_text()
            assert "1 passed, 1 failed, 1 skipped" in text
            assert "| tests.gpu.test_a::test_two | failed | 0.5 | assert 1 == 2 |" in text
            assert "one of them" in text and '"graphs_over_live_rows": 1.5' in text

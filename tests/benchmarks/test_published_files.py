"""Tables of measured runs as somebody may write them: read, or refused in one sentence."""

import csv
import dataclasses
from pathlib import Path

import pytest
from benchmarks.published import read_runs

TABLE = Path(__file__).parents[2] / "benchmarks" / "measured_runs.csv"


def write(path: Path, **values: str) -> Path:
    """A table of the first measured run with other values."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first))
        writer.writeheader()
        writer.writerow({**first, **values})
    return path


def test_a_run_as_published_is_read(tmp_path: Path) -> None:
    runs, others = read_runs(write(tmp_path / "runs.csv"))
    assert len(runs) == 1 and not others and dataclasses.is_dataclass(runs[0])


@pytest.mark.parametrize("value", ["inf", "nan", "1e999", "0", "x", "9" * 5000])
@pytest.mark.parametrize("column", ["gpus", "seq_len", "tp", "pp", "micro_batch", "tokens_s_gpu"])
def test_a_number_that_cannot_be_makes_a_run_that_is_not_predicted(column: str, value: str, tmp_path: Path) -> None:
    runs, others = read_runs(write(tmp_path / "runs.csv", **{column: value, "iter_time_s": ""}))
    assert len(runs) + len(others) == 1


@pytest.mark.parametrize("content", [b"x" * 200_000, b"\xff", b'"a', b"", b"a\0b"])
def test_a_file_that_is_no_table_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"runs\.csv"):
        read_runs(tmp_path / "runs.csv")

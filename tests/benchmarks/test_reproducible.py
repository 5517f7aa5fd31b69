"""The benchmark of reproducible tokens, on a model of a few thousand parameters."""

import pytest
from benchmarks.reproducible import measure, parser


def test_every_job_has_a_ratio_and_no_token_of_the_mode_has_other_bits(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--hidden-size", "64", "--vocab-size", "50", "--lengths", "300", "--rows", "1", "3"]
    found = measure(parser().parse_args([*sizes, "--new-tokens", "6", "--rounds", "1"]))
    jobs = found["time over that of the plain mode"]
    assert list(jobs) == [
        "training, texts of 300 tokens",
        "scoring, texts of 300 tokens",
        "decoding, 1 answers",
        "decoding, 3 answers",
    ]
    assert all(ratio["median"] > 0 for ratio in jobs.values()) and len(capsys.readouterr().err.splitlines()) == len(
        jobs
    )
    differing = found["tokens that scoring gives other bits"]
    assert found["tokens"] == 18 and differing["reproducible"] == 0 <= differing["plain"] <= 18

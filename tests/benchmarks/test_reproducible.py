"""The benchmark of reproducible tokens, on a model of a few thousand parameters."""

from benchmarks.reproducible import Reproducing, measure


def test_every_job_has_a_ratio_and_no_token_of_the_mode_has_other_bits() -> None:
    asked = Reproducing(
        num_layers=1, hidden_size=64, vocab_size=50, lengths=(300,), num_rows=(1, 3), new_tokens=6, num_rounds=1
    )
    lines: list[str] = []
    found = measure(asked, lines.append)
    jobs = found["time over that of the plain mode"]
    assert list(jobs) == [
        "training, texts of 300 tokens",
        "scoring, texts of 300 tokens",
        "decoding, 1 answers",
        "decoding, 3 answers",
    ]
    assert all(ratio["median"] > 0 for ratio in jobs.values()) and len(lines) == len(jobs)
    differing = found["tokens that scoring gives other bits"]
    assert found["tokens"] == 18 and differing["reproducible"] == 0 <= differing["plain"] <= 18

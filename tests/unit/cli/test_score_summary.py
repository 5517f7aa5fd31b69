"""The line that `penstock score` ends with."""

from dataclasses import replace

import pytest

from penstock.cli.score import Summary

ONE = Summary(num_lines=1, num_scored_tokens=1, log_prob=-1.0, perplexity=2.5, time_s=1.0, tokens_per_s=1.0)


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (ONE, "1 line, 1 token scored, perplexity 2.5000"),
        (replace(ONE, num_lines=2, num_scored_tokens=3000), "2 lines, 3,000 tokens scored, perplexity 2.5000"),
        (replace(ONE, perplexity=None), "1 line, 1 token scored, perplexity above 1e304"),
        (replace(ONE, num_scored_tokens=0, perplexity=None), "1 line, 0 tokens scored, no token had one before it"),
        (replace(ONE, num_rated=1), "1 line rated"),
    ],
)
def test_one_line_and_one_token_are_in_the_singular(summary: Summary, said: str) -> None:
    assert str(summary) == said

"""The line that `penstock score` ends with."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli.score import ScoreArguments, ScoreConfig, _show
from penstock.cli.scoring import Summary
from penstock.settings import ParallelConfig

ONE = Summary(
    num_lines=1,
    num_scored_tokens=1,
    log_prob=-1.0,
    perplexity=2.5,
    num_rated=0,
    mean_reward=None,
    resumed_from=0,
    time_s=1.0,
    tokens_per_s=1.0,
)


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (ONE, "1 line, 1 token scored, perplexity 2.5000; wrote out.jsonl"),
        (replace(ONE, num_lines=2, num_scored_tokens=3000), "2 lines, 3,000 tokens scored, "),
        (replace(ONE, perplexity=None), "1 line, 1 token scored, perplexity above 1e304; wrote out.jsonl"),
        (replace(ONE, num_scored_tokens=0, perplexity=None), "1 line, 0 tokens scored, no token had one before it; "),
        (replace(ONE, num_rated=1), "1 line rated; wrote out.jsonl"),
    ],
)
def test_one_line_and_one_token_are_in_the_singular(
    summary: Summary, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ScoreArguments(
        model=Path("model"),
        file=Path("texts.jsonl"),
        output=Path("out.jsonl"),
        parallel=ParallelConfig(),
        scoring=ScoreConfig(),
        opened={},
        special_tokens=True,
        json=False,
    )
    _show(summary, arguments)
    assert capsys.readouterr().out.startswith(said)

"""Drawing tokens: which are left, how likely each is, and that the draws follow."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.model import Draw, draw_tokens
from penstock.model.sampling import JointDraw, below_share, filtered, unpacked
from penstock.settings import SamplingParams

PLAIN = SamplingParams()
TIED = [2.0, 1.0, 1.0, 0.5, 1.0, -1.0, 0.5, -3.0]


def kept(logits: list[float], params: SamplingParams, position: int = 100) -> list[int]:
    """The tokens that can be drawn."""
    masked = filtered(torch.tensor([logits]), JointDraw.of([Draw(params, 0, position)], None))[0]
    return torch.isfinite(masked).nonzero()[:, 0].tolist()


def reference(logits: list[float], params: SamplingParams) -> list[float]:
    """The distribution by its definition, one token at a time, in Python's floats."""
    scaled = [x / params.temperature for x in logits]

    def softmax(tokens: set[int]) -> dict[int, float]:
        total = math.fsum(math.exp(scaled[t]) for t in tokens)
        return {t: math.exp(scaled[t]) / total for t in tokens}

    def outside(tokens: set[int]) -> set[int]:
        left_out, dropped = 0.0, set()
        likely = softmax(tokens)
        for token in sorted(tokens, key=lambda t: (scaled[t], t))[:-1]:
            left_out += likely[token]
            if left_out <= 1 - params.top_p:
                dropped.add(token)
        return dropped

    everything = set(range(len(logits)))
    limit = sorted(scaled)[-min(params.top_k or len(logits), len(logits))]
    below = {t for t in everything if scaled[t] < limit}
    by_p = outside(everything - below if params.chained else everything) if params.top_p < 1 else set()
    likely = softmax(everything - below - by_p)
    return [likely.get(t, 0.0) for t in range(len(logits))]


SETTINGS = {
    "plain": PLAIN,
    "warm": SamplingParams(temperature=1.7),
    "cold": SamplingParams(temperature=0.3),
    "top-k with ties": SamplingParams(top_k=3),
    "top-k of all": SamplingParams(top_k=100),
    "no top-k": SamplingParams(top_k=0, top_p=0.9, chained=True),
    "top-p": SamplingParams(top_p=0.6),
    "tiny top-p": SamplingParams(top_p=1e-6),
    "both": SamplingParams(temperature=0.8, top_k=2, top_p=0.75),
    "chained": SamplingParams(temperature=0.8, top_k=2, top_p=0.75, chained=True),
}


@pytest.mark.shows(63, 64)
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_100_000_draws_follow_the_distribution(params: SamplingParams) -> None:
    count, expected = 100_000, reference(TIED, params)
    logits = torch.tensor([TIED]).expand(count, -1)
    drawn = draw_tokens(logits, [Draw(params, sequence, 5) for sequence in range(count)])
    frequencies = torch.bincount(drawn.tokens, minlength=len(TIED)).tolist()
    assert all(found == 0 for found, p in zip(frequencies, expected, strict=True) if p == 0)
    possible = [(found, p * count) for found, p in zip(frequencies, expected, strict=True) if p > 0]
    statistic = sum((found - mean) ** 2 / mean for found, mean in possible)
    # One such test in ten thousand of a perfect generator would fail; the seeds are fixed, so this one never does.
    chi_square = torch.distributions.Chi2(torch.tensor(max(1.0, len(possible) - 1.0)))
    assert 1 - _cdf(chi_square, statistic) > 1e-4
    wanted = torch.tensor(expected)[drawn.tokens].log()
    torch.testing.assert_close(drawn.log_probs, wanted, rtol=1e-5, atol=1e-5)


def _cdf(chi_square: torch.distributions.Chi2, statistic: float) -> float:
    return float(torch.special.gammainc(chi_square.df / 2, torch.tensor(statistic / 2)))


@pytest.mark.shows(63)
@pytest.mark.parametrize(
    ("top_p", "left"),
    [(0.001, 1), (0.399, 1), (0.401, 2), (0.699, 2), (0.701, 3), (0.899, 3), (0.901, 4), (0.999, 4)],
)
def test_the_token_that_reaches_top_p_is_kept_and_the_next_one_is_not(top_p: float, left: int) -> None:
    """Of 0.4, 0.3, 0.2 and 0.1 the first 1, 2, 3 and 4 together have 0.4, 0.7, 0.9 and 1."""
    for order in ([0, 1, 2, 3], [3, 1, 0, 2]):
        logits = [math.log((0.4, 0.3, 0.2, 0.1)[rank]) for rank in order]
        assert {order[token] for token in kept(logits, SamplingParams(top_p=top_p))} == set(range(left))
    # The same of what top-k leaves of more tokens: 4/7 and 3/7.
    first_alone = SamplingParams(top_k=2, top_p=4 / 7 - 0.001, chained=True)
    logits = [math.log(p) for p in (0.1, 0.4, 0.2, 0.3)]
    assert kept(logits, first_alone) == [1]
    assert kept(logits, replace(first_alone, top_p=4 / 7 + 0.001)) == [1, 3]


@pytest.mark.shows(63)
@pytest.mark.parametrize(("top_p", "left"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.51, 3), (0.75, 3), (0.76, 4)])
def test_equally_likely_tokens_are_kept_until_they_have_top_p_exactly(top_p: float, left: int) -> None:
    """Four of 0.25 each, exactly: as many as are needed and no more, though others are as likely."""
    assert len(kept([1.5] * 4, SamplingParams(top_p=top_p))) == left
    # Others that can hardly be drawn change nothing of it.
    assert len(kept([-200.0, 1.5, 1.5, -200.0, 1.5, 1.5], SamplingParams(top_p=top_p))) == left


@pytest.mark.shows(65)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_cannot_be_drawn_too_early(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_new_tokens=3, end_tokens=(0, 1))
    assert kept(TIED, params, position=2) == [2, 3, 4, 5, 6, 7]
    assert kept(TIED, params, position=3) == list(range(8))
    drawn = draw_tokens(torch.tensor([TIED] * 4), [Draw(params, 0, position) for position in range(4)])
    assert all(token > 1 for token in drawn.tokens[:3].tolist())
    wanted = torch.tensor([[-torch.inf, -torch.inf, *TIED[2:]]]).log_softmax(-1)[0, drawn.tokens[0]]
    torch.testing.assert_close(drawn.log_probs[0], wanted)


@pytest.mark.shows(64, 67)
def test_greedy_takes_the_likeliest_and_no_filter_touches_its_probability() -> None:
    logits = torch.randn(16, 50, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0, top_k=2, top_p=0.1)
    drawn = draw_tokens(logits, [Draw(params, row, 0) for row in range(16)])
    assert torch.equal(drawn.tokens, logits.argmax(-1))
    torch.testing.assert_close(drawn.log_probs, logits.log_softmax(-1).amax(-1))


@pytest.mark.shows(64)
def test_raw_log_probabilities_are_those_of_the_model_itself() -> None:
    logits = torch.randn(9, 30, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=2.0, top_k=4, raw_log_probs=True)
    drawn = draw_tokens(logits, [Draw(params, row, 0) for row in range(9)])
    assert torch.equal(drawn.raw_log_probs, logits.log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0])
    assert (drawn.log_probs > drawn.raw_log_probs).all()
    asked, not_asked = (unpacked(drawn.packed(), [own] * 9) for own in (params, replace(params, raw_log_probs=False)))
    assert [token.raw_log_prob for token in asked] == drawn.raw_log_probs.tolist()
    assert {token.raw_log_prob for token in not_asked} == {None}


@pytest.mark.shows(68)
def test_the_mask_of_what_was_filtered_gives_the_probability_back() -> None:
    logits = torch.randn(12, 40, generator=torch.Generator().manual_seed(2))
    asked = SamplingParams(temperature=0.7, top_k=5, top_p=0.8, filter_mask=True)
    plain = SamplingParams(filter_mask=True)
    draws = [Draw(asked if row % 2 else plain, row, 0) for row in range(12)]
    drawn = draw_tokens(logits, draws)
    assert drawn.dropped_SV is not None
    for row, draw in enumerate(draws):
        dropped = drawn.dropped_SV[row]
        assert bool(dropped.any()) == (draw.params is asked)
        again = (logits[row] / draw.params.temperature).masked_fill(dropped, -torch.inf).log_softmax(-1)
        torch.testing.assert_close(again[drawn.tokens[row]], drawn.log_probs[row])
    assert draw_tokens(logits, [Draw(PLAIN, 0, 0)] * 12).dropped_SV is None


@pytest.mark.shows(73)
@pytest.mark.parametrize("params", SETTINGS.values(), ids=SETTINGS.keys())
def test_a_draw_is_the_same_in_any_company(params: SamplingParams) -> None:
    logits = torch.randn(40, 64, generator=torch.Generator().manual_seed(3))
    draws = [Draw(params, row, row % 7) for row in range(40)]
    together = draw_tokens(logits, draws)
    for rows in ([0], [5, 3], list(range(39, -1, -1)), list(range(17))):
        some = draw_tokens(logits[rows], [draws[row] for row in rows])
        assert torch.equal(some.tokens, together.tokens[rows])
        assert torch.equal(some.log_probs, together.log_probs[rows])
    mixed = [draw if row % 2 else replace(draw, params=SamplingParams(temperature=0)) for row, draw in enumerate(draws)]
    assert torch.equal(draw_tokens(logits, mixed).tokens[1::2], together.tokens[1::2])


@pytest.mark.parametrize(
    "change",
    [
        lambda draw: replace(draw, position=draw.position + 1),
        lambda draw: replace(draw, sequence=draw.sequence + 1),
        lambda draw: replace(draw, params=replace(draw.params, seed=draw.params.seed + 1)),
    ],
    ids=["position", "sequence", "seed"],
)
def test_random_numbers_of_neighbours_have_nothing_in_common(change: Callable[[Draw], Draw]) -> None:
    draws = [Draw(SamplingParams(seed=s), q, p) for s in range(10) for q in range(20) for p in range(50)]
    ours = torch.tensor([draw.uniform() for draw in draws], dtype=torch.float64)
    theirs = torch.tensor([change(draw).uniform() for draw in draws], dtype=torch.float64)
    assert ((ours >= 0) & (ours < 1)).all()
    # Four standard deviations of a correlation of ten thousand independent pairs, and of their mean.
    assert abs(float(torch.corrcoef(torch.stack([ours, theirs]))[0, 1])) < 4 / math.sqrt(len(draws))
    assert abs(float(ours.mean()) - 0.5) < 4 / math.sqrt(12 * len(draws))


@pytest.mark.shows(67)
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_new_tokens": 2, "min_new_tokens": 3}, "min_new_tokens = 3: at most sampling.max_new_tokens = 2"),
        ({"end_tokens": (-1,)}, "sampling.end_tokens = "),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told.replace("(", r"\(")):
        SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.mark.shows(63)
def test_rare_tokens_of_a_large_vocabulary_are_drawn_as_often_as_they_should() -> None:
    vocab_size, count = 20_000, 4_000
    logits = torch.zeros(1, vocab_size)
    tokens: Tensor = torch.cat(
        [
            draw_tokens(logits.expand(500, -1), [Draw(PLAIN, start + i, 0) for i in range(500)]).tokens
            for start in range(0, count, 500)
        ]
    )
    tenths = torch.bincount(tokens * 10 // vocab_size, minlength=10).double()
    statistic = float(((tenths - count / 10) ** 2 / (count / 10)).sum())
    assert 1 - _cdf(torch.distributions.Chi2(torch.tensor(9.0)), statistic) > 1e-4


def test_a_token_at_the_very_share_of_the_likeliest_stays() -> None:
    # Two that are equally likely have exactly the share 1 of each other.
    assert below_share(torch.tensor([[1.0, 1.0, 0.5]]), 1.0).tolist() == [[False, False, True]]

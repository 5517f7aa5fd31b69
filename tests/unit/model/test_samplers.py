"""Penalties, biases, bad words, min-p and the likeliest tokens, beside transformers' processors on the same logits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from penstock import SamplingParams
from penstock.engine.generation.prompts import check_prompts
from penstock.model import Draw, Limits, draw_tokens
from penstock.model.sampling import JointDraw, filtered, unpacked
from penstock.settings import ConfigError
from tests.generation import CONFIG, generate_together, random_prompts

VOCABULARY = 40
PROMPT, ANSWERS = [3, 8, 8, 21, 0], ([5, 5, 7], [8, 5, 39], [1, 2, 3])
BIAS = {5: 2.5, 39: -3.0}
BAD_WORDS = ((4,), (5, 7, 6), (21, 0, 5, 5, 7, 9), (2, 3, 11))


class OpenAiPenalties(LogitsProcessor):
    """The formula of OpenAI's API, one token at a time: mu[j] - c[j] * frequency - float(c[j] > 0) * presence."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Any:
        scores = scores.clone()
        for row, ids in enumerate(input_ids[:, len(PROMPT) :].tolist()):
            for token in range(scores.shape[1]):
                count = ids.count(token)
                scores[row, token] -= torch.tensor(float(count > 0) * self.presence + count * self.frequency)
        return scores


CASES: dict[str, tuple[SamplingParams, list[Any]]] = {
    "min-p": (SamplingParams(min_p=0.2), [lambda: MinPLogitsWarper(0.2)]),
    "repetition": (SamplingParams(repetition_penalty=1.3), [lambda: RepetitionPenaltyLogitsProcessor(1.3)]),
    "presence and frequency": (
        SamplingParams(presence_penalty=0.7, frequency_penalty=-0.4),
        [lambda: OpenAiPenalties(0.7, -0.4)],
    ),
    "bias": (
        SamplingParams(logit_bias=BIAS),
        [lambda: SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()])],
    ),
    "bad words": (
        SamplingParams(bad_words=BAD_WORDS),
        [lambda: NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS])],
    ),
    "all in turn": (
        SamplingParams(
            logit_bias=BIAS,
            repetition_penalty=0.8,
            presence_penalty=0.5,
            frequency_penalty=0.25,
            bad_words=BAD_WORDS,
            temperature=0.7,
            top_k=12,
            top_p=0.9,
            chained=True,
            min_p=0.05,
        ),
        [
            lambda: SequenceBiasLogitsProcessor([[[token], bias] for token, bias in BIAS.items()]),
            lambda: RepetitionPenaltyLogitsProcessor(0.8),
            lambda: OpenAiPenalties(0.5, 0.25),
            lambda: NoBadWordsLogitsProcessor([list(word) for word in BAD_WORDS]),
            lambda: TemperatureLogitsWarper(0.7),
            lambda: TopKLogitsWarper(12),
            lambda: TopPLogitsWarper(0.9),
            lambda: MinPLogitsWarper(0.05),
        ],
    ),
}


def random_logits(seed: int, rows: int = len(ANSWERS)) -> Tensor:
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


@pytest.mark.shows(129)
@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_processors(name: str) -> None:
    params, processors = CASES[name]
    ids = torch.tensor([PROMPT + answer for answer in ANSWERS])
    draws = [Draw(params, row, len(answer), PROMPT, answer) for row, answer in enumerate(ANSWERS)]
    changed = 0
    for seed in range(20):
        logits = random_logits(seed)
        processed: Any = LogitsProcessorList(make() for make in processors)
        expected = processed(ids, logits.clone())
        found = filtered(logits.clone(), JointDraw.of(draws, None))
        assert torch.equal(found.isinf(), expected.isinf())
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        changed += not torch.equal(found, logits)
    assert changed == 20, "the case changes nothing"


@pytest.mark.shows(129)
def test_the_likeliest_tokens_and_their_log_probabilities_come_with_each_token() -> None:
    logits = random_logits(1, rows=4)
    params = [SamplingParams(temperature=2.0, top_k=1, top_log_probs=n, bad_words=((7,),)) for n in (0, 3, 1, 40)]
    drawn = draw_tokens(logits, [Draw(own, row, 0) for row, own in enumerate(params)])
    tokens = unpacked(drawn.packed(), params)
    for row, (token, own) in enumerate(zip(tokens, params, strict=True)):
        ranked = logits[row].log_softmax(-1).sort(descending=True)
        expected = list(zip(ranked.indices.tolist(), ranked.values.tolist(), strict=True))[: own.top_log_probs]
        assert [id for id, _ in token.likeliest] == [id for id, _ in expected]
        assert [x for _, x in token.likeliest] == pytest.approx([x for _, x in expected], abs=1e-6)


@pytest.mark.parametrize("vocab_size", [7, 3000, 100_003])
@pytest.mark.parametrize("num", [1, 3, 7])
def test_equal_tokens_are_listed_in_the_order_in_which_the_greedy_choice_takes_them(vocab_size: int, num: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size + num)
    # Few different numbers, as 16 bits have: the last of the list has equals outside.
    logits = torch.randint(0, 3, (6, vocab_size), generator=generator).bfloat16()
    logits[0, -1] = 5
    greedy = SamplingParams(temperature=0, top_log_probs=num)
    drawn = draw_tokens(logits, [Draw(greedy, row, 0) for row in range(len(logits))])
    assert drawn.likeliest_SN[:, 0].tolist() == drawn.tokens.tolist()
    for row, ids in zip(logits.tolist(), drawn.likeliest_SN.tolist(), strict=True):
        assert ids == sorted(range(vocab_size), key=row.__getitem__, reverse=True)[:num]


@pytest.mark.shows(129)
def test_raw_log_probabilities_are_the_models_own_whatever_changes_the_draw() -> None:
    logits = random_logits(2)
    params = SamplingParams(
        temperature=0.7, top_k=9, repetition_penalty=1.5, logit_bias=BIAS, bad_words=BAD_WORDS, raw_log_probs=True
    )
    draws = [Draw(params, row, len(answer), PROMPT, answer) for row, answer in enumerate(ANSWERS)]
    drawn = draw_tokens(logits, draws)
    own = logits.log_softmax(-1).gather(-1, drawn.tokens[:, None])[:, 0]
    torch.testing.assert_close(drawn.raw_log_probs, own, rtol=0, atol=1e-6)
    assert not torch.allclose(drawn.log_probs, own, atol=0.1)


EVERYTHING = SamplingParams(
    max_new_tokens=9,
    temperature=1.3,
    min_p=0.01,
    repetition_penalty=1.4,
    presence_penalty=0.3,
    frequency_penalty=0.6,
    logit_bias={4: 1.5},
    bad_words=((9,), (4, 4)),
    top_log_probs=3,
    num_samples=2,
)


@pytest.mark.shows(129)
def test_tokens_do_not_depend_on_the_layout_or_the_company() -> None:
    prompts = random_prompts([5, 2, 8])
    plain = SamplingParams(max_new_tokens=9, temperature=1.3, num_samples=2)
    alone = [generate_together(1, [prompt], EVERYTHING).answers for prompt in prompts]
    expected = [(answer.tokens, answer.top_log_probs) for answers in alone for answer in answers]
    company = random_prompts([3, 6], seed=9)
    assert any(a.tokens != b.tokens for a, b in zip(alone[0], generate_together(1, prompts[:1], plain).answers))
    for ranks in (1, 2, 3):
        mixed = generate_together(ranks, [*prompts, *company], [EVERYTHING] * 3 + [plain] * 2).answers
        assert [(answer.tokens, answer.top_log_probs) for answer in mixed[:6]] == expected
        assert all(answer.top_log_probs is None for answer in mixed[6:])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {-1: 1.0}}, "give token ids and finite numbers"),
        ({"logit_bias": {"a": 1.0}}, "give token ids"),
        ({"logit_bias": {1: float("inf")}}, "finite"),
        ({"logit_bias": 3}, "expected dict"),
        ({"bad_words": ((),)}, "give one or more token ids"),
        ({"bad_words": (3,)}, "expected list"),
        ({"stop": ("",)}, "give some characters"),
    ],
)
def test_what_cannot_be_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [{"logit_bias": {97: 1.0}}, {"bad_words": ((1, 97),)}, {"top_log_probs": 98}])
def test_tokens_outside_of_the_vocabulary_are_refused(given: dict[str, object]) -> None:
    limits, prompts = Limits(CONFIG.vocabulary, 50), [[1]]

    def check(params: Sequence[SamplingParams]) -> None:
        check_prompts(prompts, params, limits)

    check([SamplingParams(max_new_tokens=3)])
    check([SamplingParams(max_new_tokens=3, logit_bias={96: 1.0}, bad_words=((1, 96),), top_log_probs=97)])
    with pytest.raises(ValueError, match="the model knows"):
        check([SamplingParams(max_new_tokens=3, **given)])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bad_words hold every token alone"):
        check([SamplingParams(max_new_tokens=3, bad_words=tuple((token,) for token in range(97)))])


@pytest.mark.parametrize(("most", "message"), [(None, "pass the model's max_length=9"), (6, "pass 6, where the model")])
def test_a_prompt_and_its_tokens_may_be_as_long_as_the_model_allows_and_no_longer(
    most: int | None, message: str
) -> None:
    limits, prompts = Limits(CONFIG.vocabulary, 9, max_generated_length=most), [[1, 2, 3], [4] * 5]
    num_new = 4 if most is None else 1
    check_prompts(prompts, [SamplingParams(max_new_tokens=num_new)] * 2, limits)
    with pytest.raises(ValueError, match=rf"^prompt 1 has 5 tokens, and with .* {message}"):
        check_prompts(prompts, [SamplingParams(max_new_tokens=num_new + 1)] * 2, limits)


# ---- on a device


class Copies(TorchDispatchMode):
    """Counts copies to another device; one that the host waits for is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, devices = func._schema.name, {x.device for x in tree_leaves(args) if isinstance(x, Tensor) and x.dim()}
        if name == "aten::_to_copy" and (kwargs or {}).get("device") not in (None, args[0].device):
            assert kwargs["non_blocking"], "a copy that waits"
            self.number += 1
        else:
            assert len(devices) < 2, f"{name} of tensors on two devices"
        return func(*args, **(kwargs or {}))


def copies(num_rows: int) -> int:
    """The copies for one token of each row, whose draws are of two kinds, both with all that reads the answer."""
    params = SamplingParams(
        repetition_penalty=1.3,
        presence_penalty=0.7,
        frequency_penalty=0.1,
        logit_bias=BIAS,
        bad_words=BAD_WORDS,
        min_new_tokens=5,
        end_tokens=(1, 2),
        top_k=9,
        top_p=0.9,
        begins_with=(8, 5, 39, 4),
    )
    kinds = params, replace(params, temperature=0)
    draws = [Draw(kinds[row % 2], row, 3, [*PROMPT, row], ANSWERS[row % 3]) for row in range(num_rows)]
    with Copies() as found:
        draw_tokens(torch.empty(num_rows, VOCABULARY, device="meta"), draws)
    return found.number


@pytest.mark.shows(208)
def test_on_a_device_the_host_waits_for_no_copy_and_makes_as_many_for_any_number_of_rows() -> None:
    assert 0 < copies(6) == copies(48) < 24

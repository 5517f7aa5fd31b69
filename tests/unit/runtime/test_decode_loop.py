"""Generation with every rank of the ring in a thread: endings of every kind, rings of every shape."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from penstock import schedule
from penstock.engine.generation.options import GenerateOptions
from penstock.model import Sequences, decoder_units
from penstock.schedule import Ending, PlacementKind
from penstock.settings import SamplingParams
from tests.covering import EVERY
from tests.generation import CONFIG, Together, generate_together, load, random_prompts, random_weights

SAMPLED = SamplingParams(max_new_tokens=12, temperature=1.3, top_k=40, top_p=0.95, raw_log_probs=True)


def everything(answers: Sequence[schedule.Sequence]) -> list[object]:
    return [(a.tokens, a.log_probs, a.raw_log_probs, a.ending) for a in answers]


def check_no_waste(found: Together, prompts: Sequence[Sequence[int]], passes: int = 1) -> None:
    """Every message was taken, and every stage has read what the answers are made of, and nothing else.

    That is all tokens of a prompt, for further samples of it the last one, and of an answer all but the last.
    """
    assert found.num_pending == 0
    needed = sum(
        len(answer.tokens) - 1 + (len(prompts[answer.prompt]) if answer.sample == 0 else 1) for answer in found.answers
    )
    assert {loop.num_tokens for loop in found.loops} == {needed * passes}


@pytest.mark.shows(62, 74)
def test_greedy_answers_are_those_of_a_loop_without_a_cache() -> None:
    prompts = random_prompts()
    modules = nn.ModuleDict({unit.name.replace(".", "/"): unit.build() for unit in decoder_units(CONFIG)})
    load({name.replace("/", "."): p for name, p in modules.named_parameters()}, random_weights())

    def logits(tokens: list[int]) -> Tensor:
        x, sequences = torch.tensor(tokens), Sequences.from_lengths([len(tokens)])
        for module in modules.values():
            x = module(x, sequences)
        return x[-1]

    naive = []
    with torch.no_grad():
        for prompt in prompts:
            tokens = list(prompt)
            while len(tokens) < len(prompt) + 20:
                tokens.append(int(logits(tokens).argmax()))
            naive.append(tuple(tokens[len(prompt) :]))
    assert len(set(naive)) == len(prompts)
    found = generate_together(3, prompts, SamplingParams(max_new_tokens=20, temperature=0))
    assert [answer.tokens for answer in found.answers] == naive


@pytest.mark.shows(70, 71, 73, 74)
@pytest.mark.parametrize("num_ranks", range(1, 9) if EVERY else (1, 2, 3, 5))
def test_answers_and_their_probabilities_are_the_same_bit_for_bit_on_any_ring(num_ranks: int) -> None:
    prompts = random_prompts()
    params = [replace(SAMPLED, seed=i, num_samples=1 + i % 3) for i in range(len(prompts))]
    expected = everything(generate_together(1, prompts, params).answers)
    assert len({str(answer) for answer in expected}) == len(expected) == 12
    shapes = [
        GenerateOptions(),
        GenerateOptions(num_slots=1, rows_per_slot=1),
        GenerateOptions(num_slots=8, rows_per_slot=2),
        GenerateOptions(num_slots=num_ranks + 1, rows_per_slot=3, refill=False, longest_first=False),
    ]
    for options in shapes:
        found = generate_together(num_ranks, prompts, params, options)
        assert everything(found.answers) == expected
        check_no_waste(found, prompts)


@pytest.mark.shows(208)
@pytest.mark.parametrize("rows_per_slot", [1, 3, 16])
def test_tokens_that_the_host_reads_a_batch_late_are_the_same(rows_per_slot: int) -> None:
    prompts, options = random_prompts(), GenerateOptions(num_slots=1, rows_per_slot=rows_per_slot)
    params = [
        replace(SAMPLED, seed=i, num_samples=1 + i % 3, filter_mask=True, presence_penalty=0.5 * (i % 2))
        for i in range(len(prompts))
    ]
    ends = [answer.tokens[2 * i % 7] for i, answer in enumerate(generate_together(1, prompts, params, options).answers)]
    params = [replace(own, end_tokens=tuple(ends[i::3])) for i, own in enumerate(params)]
    at_once, late = (generate_together(1, prompts, params, options, late=late) for late in (0, 1))
    assert everything(late.answers) == everything(at_once.answers)
    for one, other in zip(late.answers, at_once.answers, strict=True):
        assert one.filter_mask is not None and torch.equal(one.filter_mask, other.filter_mask)
    # Of each answer that an end token ended, the token behind it was computed.
    num_ended = sum(answer.ending is Ending.END_TOKEN for answer in late.answers)
    foreseen = sum(len(a.tokens) == SAMPLED.max_new_tokens for a in late.answers if a.ending is Ending.END_TOKEN)
    assert late.loops[0].num_tokens - at_once.loops[0].num_tokens == num_ended - foreseen > 3


@pytest.mark.shows(73, 74)
def test_each_answer_is_that_of_its_prompt_alone_whatever_the_order() -> None:
    prompts = random_prompts()
    expected = [everything(generate_together(1, [prompt], SAMPLED).answers)[0] for prompt in prompts]
    for seed in range(4):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        found = generate_together(2, [prompts[i] for i in order], SAMPLED, GenerateOptions(rows_per_slot=2))
        assert everything(found.answers) == [expected[i] for i in order]


@pytest.mark.shows(74)
def test_equal_prompts_and_samples_of_one_prompt_give_different_answers() -> None:
    [prompt] = random_prompts([9])
    found = generate_together(2, [prompt, prompt], replace(SAMPLED, num_samples=3))
    assert len({answer.tokens for answer in found.answers}) == 6
    greedy = generate_together(2, [prompt, prompt], SamplingParams(max_new_tokens=12, temperature=0, num_samples=3))
    assert len({answer.tokens for answer in greedy.answers}) == 1


@pytest.mark.parametrize(
    ("kind", "stages_per_rank", "passes"),
    [(PlacementKind.LOOP, 2, 2), (PlacementKind.V, 2, 2), (PlacementKind.BIDIRECTIONAL, 2, 1)],
)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_placement_of_stages_gives_the_same_answers(
    kind: PlacementKind, stages_per_rank: int, passes: int, num_ranks: int
) -> None:
    prompts = random_prompts()
    expected = everything(generate_together(1, prompts, SAMPLED).answers)
    for options in (GenerateOptions(), GenerateOptions(num_slots=3, rows_per_slot=1, prefill_tokens=512)):
        found = generate_together(num_ranks, prompts, SAMPLED, options, kind, stages_per_rank)
        assert everything(found.answers) == expected
        check_no_waste(found, prompts, passes)


def lengths_of_every_kind() -> dict[str, list[int]]:
    return {
        "at every possible step": [1, 2, 3, 4, 5, 6, 7, 8],
        "in the opposite order": [8, 7, 6, 5, 4, 3, 2, 1],
        "all at the first step": [1] * 8,
        "all at once": [5] * 8,
        "one much later": [1, 1, 1, 16, 1, 1, 1, 1],
        "one alone": [6],
        "fewer than stages": [3, 5],
        "one token alone": [1],
        "none": [],
    }


@pytest.mark.shows(66, 67, 70, 71)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_all_ranks_leave_whenever_answers_end(num_ranks: int) -> None:
    few = GenerateOptions(num_slots=2, rows_per_slot=1)
    for number, (kind, lengths) in enumerate(lengths_of_every_kind().items()):
        prompts = random_prompts([1 + i % 3 for i in range(len(lengths))])
        params = [replace(SAMPLED, max_new_tokens=length) for length in lengths]
        # By turns, so that of each two numbers of ranks that follow each other one has either.
        for options in (GenerateOptions(), few) if EVERY else ((GenerateOptions(), few)[(number + num_ranks) % 2],):
            found = generate_together(num_ranks, prompts, params, options)
            assert [len(answer.tokens) for answer in found.answers] == lengths, kind
            check_no_waste(found, prompts)


@pytest.mark.shows(66, 70)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_an_end_token_ends_an_answer_and_belongs_to_it(num_ranks: int) -> None:
    prompts = random_prompts()
    whole = generate_together(1, prompts, replace(SAMPLED, max_new_tokens=40)).answers
    ends = (whole[0].tokens[7], whole[1].tokens[0], whole[2].tokens[20])
    cut = generate_together(num_ranks, prompts, replace(SAMPLED, max_new_tokens=40, end_tokens=ends))
    num_ended = 0
    for with_ends, without in zip(cut.answers, whole, strict=True):
        places = [i for i, token in enumerate(without.tokens) if token in ends]
        length = places[0] + 1 if places else 40
        assert with_ends.tokens == without.tokens[:length]
        assert with_ends.ending is (Ending.END_TOKEN if places else Ending.LENGTH)
        num_ended += bool(places)
    assert num_ended >= 3
    check_no_waste(cut, prompts)


def test_one_rank_sends_no_message() -> None:
    found = generate_together(1, random_prompts(), SAMPLED)
    assert found.num_messages == 0 and len(found.answers) == 6


@pytest.mark.shows(71)
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_a_token_costs_each_link_a_header_and_its_activations_and_one_message_back(num_ranks: int) -> None:
    prompts = random_prompts([3])
    found = generate_together(num_ranks, prompts, replace(SAMPLED, max_new_tokens=20))
    [answer] = found.answers
    # Beside them there is the header of the empty turn that shows the slot is done, and the closing one.
    assert found.num_messages == (num_ranks - 1) * (2 * len(answer.tokens) + 2) + len(answer.tokens)


def test_long_prompts_are_read_in_parts_while_others_go_on() -> None:
    prompts = random_prompts([40, 1, 1])
    options = GenerateOptions(num_slots=1, rows_per_slot=3, prefill_tokens=8)
    found = generate_together(1, prompts, replace(SAMPLED, max_new_tokens=6), options)
    # Five visits read the long prompt, the last of them draws its first token; the short answers end meanwhile.
    assert found.loops[0].num_forwards == 5 + 5
    whole = generate_together(1, prompts, replace(SAMPLED, max_new_tokens=6))
    for part, at_once in zip(found.answers, whole.answers, strict=True):
        assert part.tokens == at_once.tokens
        torch.testing.assert_close(torch.tensor(part.log_probs), torch.tensor(at_once.log_probs), rtol=0, atol=1e-5)

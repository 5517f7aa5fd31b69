"""A generation that is interrupted between tokens takes new weights and goes on, its caches read again or kept."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from penstock import Layout, PipelineError, SamplingParams
from penstock.engine import Engine, GenerateOptions
from penstock.engine.generation.generator import Listeners
from tests.dist.launch import run_ranks
from tests.hugging_face import make_model

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7, 8], [2, 7, 1, 8, 2, 8, 1], [6], [1, 6, 1, 8]]
LENGTHS = (9, 4, 12, 2, 7)
# Interrupted twice: in the middle of the first answers, and when others have come in their place.
STOPS = (6, 17)
GREEDY = [SamplingParams(max_new_tokens=length, temperature=0) for length in LENGTHS]
# Fewer rows than prompts, so that some have not begun; prompts are cut into several reads, or read at once.
CUT = GenerateOptions(num_slots=2, rows_per_slot=1, prefill_tokens=4)
WHOLE = GenerateOptions(num_slots=2, rows_per_slot=1)


class Answered(NamedTuple):
    """What came of a generation with two interruptions."""

    #: by answer
    tokens: list[tuple[int, ...]]
    log_probs: list[tuple[float, ...]]
    versions: list[tuple[int, ...]]
    #: by interruption, by answer: how many tokens there were
    marks: list[list[int]]


def models(folder: Path) -> list[PreTrainedModel]:
    """Models that differ in all their weights, each saved in a folder of its own."""
    found = []
    for number in range(len(STOPS) + 1):
        model = make_model("llama", num_hidden_layers=2)
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / str(number))
        found.append(model)
    return found


def interrupted(rank: int, folder: Path, others: Layout, options: GenerateOptions, keep: bool) -> Answered | None:
    """Generate in a layout with weights that come from the first rank, newer ones at each interruption."""
    first = Layout(ranks=(0,))
    sources = [Engine.from_hf(folder / str(n), first, learns=False, timeout_s=60.0) for n in range(len(STOPS) + 1)]
    sampler = Engine.from_hf(folder / "0", others, learns=False, timeout_s=60.0)
    if sources[0].is_here:
        for number, source in enumerate(sources):
            source.pipeline.continue_from(number)
    count, stops, marks = 0, list(STOPS), []

    def hear(number: int, token: int) -> None:
        nonlocal count
        count += 1

    def interrupt() -> bool:
        assert sampler.grid.tp_rank == 0, "of ranks that share layers one is asked"
        return bool(stops) and count >= stops[0]

    for number in range(len(STOPS) + 1):
        if number:
            sources[number].send_weights(sampler)
        if sampler.is_here:
            if number == 0:
                result = sampler.generate(PROMPTS, GREEDY, options, hear, interrupt=interrupt)
            else:
                result = sampler.resume(keep)
            stops = stops[1:]
            marks.append([answer.num_tokens for answer in result])
            assert result.is_complete == (number == len(STOPS))
    if not sampler.is_here:
        return None
    with pytest.raises(PipelineError, match="no generation to resume"):
        sampler.resume()
    tokens, log_probs = [answer.tokens for answer in result], [answer.log_probs for answer in result]
    return Answered(tokens, log_probs, [answer.versions for answer in result], marks[:-1])


def check_versions(answered: Answered) -> None:
    """Each token bears the number of interruptions before it; some answers span all, and some were late or early."""
    for i, versions in enumerate(answered.versions):
        assert len(versions) == len(answered.tokens[i]) == LENGTHS[i]
        assert versions == tuple(sum(mark[i] <= place for mark in answered.marks) for place in range(LENGTHS[i]))
    assert [sum(mark) for mark in answered.marks] != [] and all(0 in mark for mark in answered.marks[:1])
    assert len({versions[-1] for versions in answered.versions}) > 1 < max(len(set(v)) for v in answered.versions)


def check_fresh(folder: Path, answered: Answered, bit_for_bit: bool = True) -> None:
    """Each part of each answer is what an engine with those weights alone says to the prompt and what came before."""
    ends = [*answered.marks, list(LENGTHS)]
    starts = [[0] * len(PROMPTS), *answered.marks]
    for number, (begin, end) in enumerate(zip(starts, ends, strict=True)):
        engine = Engine.from_hf(folder / str(number), learns=False)
        for i, prompt in enumerate(PROMPTS):
            if begin[i] < end[i]:
                params = SamplingParams(max_new_tokens=end[i] - begin[i], temperature=0)
                [alone] = engine.generate([prompt + list(answered.tokens[i][: begin[i]])], params, CUT)
                assert alone.tokens == answered.tokens[i][begin[i] : end[i]]
                assert not bit_for_bit or alone.log_probs == answered.log_probs[i][begin[i] : end[i]]


@torch.inference_mode()
def kept(found: list[PreTrainedModel], marks: list[list[int]]) -> list[tuple[int, ...]]:
    """The answers of transformers' models that take turns, as the marks say, over one cache that is kept."""
    answers = []
    for i, prompt in enumerate(PROMPTS):
        cache, ids, tokens = DynamicCache(), torch.tensor([prompt]), []
        for place in range(LENGTHS[i]):
            model = found[sum(mark[i] <= place for mark in marks)]
            logits = model(ids, past_key_values=cache).logits[0, -1]
            tokens.append(int(logits.argmax()))
            ids = torch.tensor([[tokens[-1]]])
        answers.append(tuple(tokens))
    return answers


@pytest.mark.shows(126)
def test_tokens_after_an_interruption_are_those_of_new_weights_or_of_kept_caches(tmp_path: Path) -> None:
    found = models(tmp_path)
    by_rank = run_ranks(3, all_of_them, tmp_path, timeout_s=90.0)
    assert by_rank[0] == [None] * 5 and by_rank[1][:2] == [None] * 2
    again, keeping, ring_again, ring_keeping, shared = by_rank[2]
    assert by_rank[1][2:] == [ring_again, ring_keeping, shared]
    for answered in by_rank[2]:
        check_versions(answered)
    check_fresh(tmp_path, shared, bit_for_bit=False)
    for answered in (again, ring_again):
        check_fresh(tmp_path, answered)
    for answered in (keeping, ring_keeping):
        assert answered.tokens == kept(found, answered.marks)
    assert again.tokens != keeping.tokens and ring_again.tokens != ring_keeping.tokens


def all_of_them(rank: int, folder: Path) -> list[Answered | None]:
    alone, ring, shared = Layout(ranks=(2,)), Layout(pp=2, ranks=(1, 2)), Layout(tp=2, ranks=(1, 2))
    cases = [(layout, keeps) for layout in (alone, ring) for keeps in (False, True)]
    found = [interrupted(rank, folder, layout, WHOLE if keeps else CUT, keeps) for layout, keeps in cases]
    return [*found, interrupted(rank, folder, shared, CUT, keep=False)]


def test_pipelines_that_share_experts_are_not_interrupted() -> None:
    with pytest.raises(ValueError, match=r"ep=2.*cannot be interrupted"):
        Listeners(interrupt=lambda: True).check(Layout(dp=2, ep=2))
    with pytest.raises(ValueError, match="interrupt=3 is an int"):
        Listeners(interrupt=3).check(Layout())  # pyright: ignore[reportArgumentType]

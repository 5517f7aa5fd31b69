"""Penalties, biases and bad words: changes to the logits that depend on the prompt and on the answer so far.

Shapes: S sequences, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.settings import SamplingParams


@dataclass(frozen=True, slots=True)
class Context:
    """The tokens of a prompt, and those of the answer so far."""

    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Return whether these are the last tokens."""
        num = len(tokens)
        return num == 0 or [*self.prompt[-num:], *self.answer[-num:]][-num:] == list(tokens)


def penalised(logits_SV: Tensor, params: SamplingParams, contexts: Sequence[Context]) -> Tensor:
    """The fp32 logits after biases, repetition, presence and frequency penalties and bad words, in this order.

    Source: biases, repetition penalty and bad words as transformers' logits processors (the penalty is that of Keskar
    et al. 2019, arXiv 1909.05858, section 4.1); presence and frequency penalties as OpenAI's API defines them.
    """
    if not (params.biases or params.reads_answer):
        return logits_SV
    logits_SV = logits_SV.clone()
    if params.biases:
        tokens, values = zip(*params.biases, strict=True)
        logits_SV[:, list(tokens)] += logits_SV.new_tensor(values)
    if params.reads_answer:
        for logits_V, context in zip(logits_SV, contexts, strict=True):
            _penalise(logits_V, params, context)
    return logits_SV


def _penalise(logits_V: Tensor, params: SamplingParams, context: Context) -> None:
    if params.repetition_penalty != 1.0 and (seen := {*context.prompt, *context.answer}):
        tokens = torch.tensor(sorted(seen), device=logits_V.device)
        values = logits_V[tokens]
        penalty = params.repetition_penalty
        logits_V[tokens] = torch.where(values < 0, values * penalty, values / penalty)
    if (params.presence_penalty or params.frequency_penalty) and context.answer:
        counts = Counter(context.answer)
        lost = [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        logits_V[list(counts)] -= logits_V.new_tensor(lost)
    for *before, last in params.bad_words:
        if context.ends_with(before):
            logits_V[last] = -torch.inf

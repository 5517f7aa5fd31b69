"""Sampling: from logits to tokens and their log-probabilities.

Nothing here has state. The random number of a token is a hash of (seed, sequence, position), so a draw does not depend
on the rank, the batch or the order.

Shapes: S sequences, V vocabulary, N blocks of B numbers each.
"""

import hashlib
import struct
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.schedule import Token
from penstock.settings import SamplingParams

_SUMMED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to be drawn: new token number `position` (from 0) of the sequence with the identity `sequence`.

    Where `params.reads_answer`, `prompt` and `answer` are the tokens of the prompt, and those of the answer so far.
    """

    params: SamplingParams
    sequence: int
    position: int
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()

    def uniform(self) -> float:
        """A number in [0, 1) with 53 random bits; draws are counted from the first token that is not given."""
        number = max(0, self.position - len(self.params.begins_with))
        counter = struct.pack("<QQQ", self.params.seed, self.sequence, number)
        bits = int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little")
        return (bits >> 11) * 2.0**-53

    @property
    def given(self) -> int | None:
        """The token that is there in any case; None where one is drawn."""
        begins = self.params.begins_with
        return begins[self.position] if self.position < len(begins) else None

    def ends_with(self, tokens: Sequence[int]) -> bool:
        """Return whether these are the last tokens before the one to be drawn."""
        num = len(tokens)
        return num == 0 or [*self.prompt[-num:], *self.answer[-num:]][-num:] == list(tokens)


# ---- Penalties, biases and bad words: changes to the logits that depend on the prompt and on the answer so far


def penalised(logits_SV: Tensor, params: SamplingParams, draws: Sequence[Draw]) -> Tensor:
    """The fp32 logits after biases, repetition, presence and frequency penalties and bad words, in this order.

    Source: biases, repetition penalty and bad words as transformers' logits processors (the penalty is that of Keskar
    et al. 2019, arXiv 1909.05858, section 4.1); presence and frequency penalties as OpenAI's API defines them.
    """
    logits_SV = logits_SV.clone(memory_format=torch.contiguous_format)
    dtype, device = logits_SV.dtype, logits_SV.device
    if params.biases:
        tokens, values = zip(*params.biases, strict=True)
        logits_SV[:, _sent(tokens, torch.int64, device)] += _sent(values, dtype, device)
    if not params.reads_answer:
        return logits_SV
    # All rows at once: each copy to a device takes its time.
    logits, num_logits = logits_SV.view(-1), logits_SV.shape[1]
    if (penalty := params.repetition_penalty) != 1.0:
        places = _places([{*draw.prompt, *draw.answer} for draw in draws], num_logits, device)
        values = logits[places]
        logits[places] = torch.where(values < 0, values * penalty, values / penalty)
    if params.presence_penalty or params.frequency_penalty:
        # What the answer is given to begin with counts as its prompt does.
        counts = [Counter(draw.answer[len(draw.params.begins_with) :]) for draw in draws]
        numbers = [number for own in counts for number in own.values()]
        lost = [params.presence_penalty + params.frequency_penalty * number for number in numbers]
        logits[_places(counts, num_logits, device)] -= _sent(lost, dtype, device)
    if params.bad_words:
        bad = [[last for *before, last in params.bad_words if draw.ends_with(before)] for draw in draws]
        if any(bad):
            logits[_places(bad, num_logits, device)] = -torch.inf
    return logits_SV


def _places(tokens: Sequence[Collection[int]], num_logits: int, device: torch.device) -> Tensor:
    """The places of each row's tokens among the logits of all rows."""
    return _sent([row * num_logits + token for row, own in enumerate(tokens) for token in own], torch.int64, device)


def _sent(values: Sequence[float] | Sequence[Sequence[float]], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers on a device, whose computation the host does not wait for."""
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


# ---- Sampling: from logits to tokens and their log-probabilities


_NUM_PLAIN = 3


def numbers_per_token(params: Iterable[SamplingParams]) -> int:
    """Numbers that one token is sent as in a generation with these parameters.

    They are its id, the bits of two log-probabilities in fp64, and the ids and bits of the likeliest tokens.
    """
    return _NUM_PLAIN + 2 * max((own.top_log_probs for own in params), default=0)


@dataclass(frozen=True, eq=False)
class Drawn:
    """The chosen tokens, [S] each.

    log_probs: fp32, under the distribution that was drawn from. raw_log_probs: fp32, under the model's own, before
    temperature and filters; 0 unless requested. dropped_SV: the tokens that could not be drawn, on the CPU; None unless
    some row requests it. likeliest_SN, their log_probs_SN: as many of the likeliest tokens under the model's own
    distribution as any row requests.
    """

    tokens: Tensor
    log_probs: Tensor
    raw_log_probs: Tensor
    dropped_SV: Tensor | None
    likeliest_SN: Tensor
    likeliest_log_probs_SN: Tensor

    def packed(self) -> Tensor:
        """[S, `numbers_per_token`] int64 on the CPU; `unpacked` makes tokens of it."""
        num = self.likeliest_SN.shape[1]
        numbers_SW = self.tokens.new_zeros(len(self.tokens), _NUM_PLAIN + 2 * num)
        numbers_SW[:, 0] = self.tokens
        of_numbers = numbers_SW.view(torch.float64)
        of_numbers[:, 1], of_numbers[:, 2] = self.log_probs, self.raw_log_probs
        if num:
            numbers_SW[:, _NUM_PLAIN : _NUM_PLAIN + num] = self.likeliest_SN
            of_numbers[:, _NUM_PLAIN + num : _NUM_PLAIN + 2 * num] = self.likeliest_log_probs_SN
        return numbers_SW.cpu()


def unpacked(numbers_SW: Tensor, params: Sequence[SamplingParams]) -> list[Token]:
    """The tokens that `Drawn.packed` was made of, which were drawn by these parameters."""
    num = (numbers_SW.shape[1] - _NUM_PLAIN) // 2
    tokens: list[Token] = []
    of_rows = zip(numbers_SW.tolist(), numbers_SW.view(torch.float64).tolist(), params, strict=True)
    for numbers, (_, drawn, raw, *floats), own in of_rows:
        likeliest = zip(numbers[_NUM_PLAIN : _NUM_PLAIN + own.top_log_probs], floats[num:], strict=False)
        tokens.append(Token(numbers[0], drawn, raw if own.raw_log_probs else None, tuple(likeliest)))
    return tokens


def draw_tokens(logits_SV: Tensor, draws: Sequence[Draw]) -> Drawn:
    """Draw a token for each row of the logits."""
    num_rows, device = len(draws), logits_SV.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_probs, raw_log_probs = torch.zeros(2, num_rows, dtype=torch.float32, device=device)
    most, wants_mask = 0, False
    # Rows that are drawn together: seeds and lengths may differ.
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, draw in enumerate(draws):
        most, wants_mask = max(most, draw.params.top_log_probs), wants_mask or draw.params.filter_mask
        alike.setdefault(draw.params.recipe, []).append(row)
    likeliest_SN, likeliest_log_probs_SN = tokens.new_empty(num_rows, 0), log_probs.new_empty(num_rows, 0)
    if most:
        precise_SV = logits_SV.float()
        likeliest_SN = largest(precise_SV, most)
        likeliest_log_probs_SN = precise_SV.log_softmax(-1).gather(-1, likeliest_SN)
    dropped_SV = torch.zeros(logits_SV.shape, dtype=torch.bool) if wants_mask else None
    for rows in alike.values():
        whole = len(rows) == num_rows
        own = draws if whole else [draws[row] for row in rows]
        at = slice(None) if whole else _sent(rows, torch.int64, device)
        of_rows_SV = (logits_SV if whole else logits_SV[at]).float()
        masked_SV = filtered(of_rows_SV, own)
        final_SV = masked_SV.log_softmax(-1)
        # A row that is not finite may choose past the end; its log-probability then says so.
        chosen_S = _choose(masked_SV, final_SV, own).clamp(max=logits_SV.shape[-1] - 1)
        if given := {n: token for n, draw in enumerate(own) if (token := draw.given) is not None}:
            places, begun = (_sent(numbers, torch.int64, device) for numbers in (list(given), list(given.values())))
            chosen_S[places] = begun
            final_SV[places] = of_rows_SV[places].log_softmax(-1)
        tokens[at] = chosen_S
        log_probs[at] = final_SV.gather(-1, chosen_S[:, None])[:, 0]
        if own[0].params.raw_log_probs:
            raw_log_probs[at] = of_rows_SV.log_softmax(-1).gather(-1, chosen_S[:, None])[:, 0]
        if dropped_SV is not None:
            dropped_SV[slice(None) if whole else rows] = (masked_SV == -torch.inf).cpu()
    return Drawn(tokens, log_probs, raw_log_probs, dropped_SV, likeliest_SN, likeliest_log_probs_SN)


def filtered(logits_SV: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The fp32 logits to draw from: divided by the temperature, with -inf for tokens that cannot be drawn.

    All draws have the same recipe. A greedy choice has neither temperature nor filters, but penalties, biases, bad
    words and end tokens that come too early.
    """
    params = draws[0].params
    if params.biases or params.reads_answer:
        logits_SV = penalised(logits_SV, params, draws)
    if params.end_tokens and (
        early := [n for n, draw in enumerate(draws) if draw.position < draw.params.min_new_tokens]
    ):
        logits_SV = logits_SV.clone()
        rows, ends = (_sent(numbers, torch.int64, logits_SV.device) for numbers in (early, params.end_tokens))
        logits_SV[rows[:, None], ends] = -torch.inf
    if params.temperature == 0:
        return logits_SV
    if params.temperature != 1.0:
        logits_SV = logits_SV / params.temperature
    vocab_size = logits_SV.shape[-1]
    top_k = params.top_k or vocab_size
    below_k = None if top_k >= vocab_size else below_largest(logits_SV, top_k)
    if params.top_p == 1.0:
        dropped = below_k
    elif below_k is None or params.chained:
        ranked = logits_SV if below_k is None else logits_SV.masked_fill(below_k, -torch.inf)
        outside_p = outside_nucleus(ranked, params.top_p)
        dropped = outside_p if below_k is None else outside_p | below_k
    else:
        dropped = below_k | outside_nucleus(logits_SV, params.top_p)
    if params.min_p > 0:
        unlikely = below_share(logits_SV, params.min_p)
        dropped = unlikely if dropped is None else dropped | unlikely
    return logits_SV if dropped is None else logits_SV.masked_fill(dropped, -torch.inf)


def largest(logits_SV: Tensor, count: int) -> Tensor:
    """The ids [S, count] of the largest logits, largest first and equal ones by id, as the greedy choice takes them."""
    # One more, to see whether others are equal to the last.
    largest_SN, ids_SN = logits_SV.topk(min(count + 1, logits_SV.shape[-1]), -1)
    if bool((tied_S := (largest_SN.diff() == 0).any(-1)).any()):
        for row in tied_S.nonzero()[:, 0].tolist():
            (ids,) = (logits_SV[row] >= largest_SN[row, -1]).nonzero(as_tuple=True)
            order = logits_SV[row, ids].sort(descending=True, stable=True).indices
            ids_SN[row] = ids[order[: ids_SN.shape[-1]]]
    return ids_SN[:, :count]


def below_share(logits_SV: Tensor, share: float) -> Tensor:
    """True for tokens with less than this share of the likeliest one's probability; other filters do not change it."""
    probs_SV = logits_SV.softmax(-1)
    return probs_SV < share * probs_SV.amax(-1, keepdim=True)


def below_largest(logits_SV: Tensor, count: int) -> Tensor:
    """True for tokens strictly below the `count`-th largest of their row; false for ties with it."""
    return logits_SV < logits_SV.topk(count, -1).values[:, -1:]


def outside_nucleus(logits_SV: Tensor, top_p: float) -> Tensor:
    """True for tokens outside the likeliest ones that together have probability `top_p`; false for the likeliest.

    Tokens are left out from the least likely on, while all left out have at most probability 1 - top_p together.
    """
    ascending_SV, order_SV = logits_SV.sort(dim=-1, stable=True)
    left_out_SV = cumulative_(ascending_SV.softmax(-1).double()) <= 1.0 - top_p
    left_out_SV[:, -1] = False
    return torch.empty_like(left_out_SV).scatter_(-1, order_SV, left_out_SV)


def _choose(masked_SV: Tensor, final_SV: Tensor, draws: Sequence[Draw]) -> Tensor:
    if draws[0].params.temperature == 0:
        return masked_SV.argmax(-1)
    # In fp64: in fp32 the sum over a large vocabulary would lose the rare tokens.
    cumulative_SV = cumulative_(final_SV.double().exp_())
    uniform_S1 = _sent([[draw.uniform()] for draw in draws], torch.float64, masked_SV.device)
    chosen_S1 = torch.searchsorted(cumulative_SV, uniform_S1 * cumulative_SV[:, -1:], right=True)
    return chosen_S1[:, 0]


def cumulative_(values_SV: Tensor) -> Tensor:
    """The sums of each row up to each of its numbers; the values may be overwritten.

    On a GPU torch's own kernel is refused among deterministic ones.
    """
    if values_SV.is_cuda and torch.are_deterministic_algorithms_enabled():
        return sums_by_blocks(values_SV)
    return values_SV.cumsum_(-1)


def sums_by_blocks(values_SV: Tensor) -> Tensor:
    """The sums of each row up to each of its numbers, by products with triangles of ones."""
    num_values = values_SV.shape[-1]
    values_SNB = F.pad(values_SV, (0, -num_values % _SUMMED_AT_ONCE)).unflatten(-1, (-1, _SUMMED_AT_ONCE))
    sums_SNB = values_SNB @ values_SV.new_ones(_SUMMED_AT_ONCE, _SUMMED_AT_ONCE).triu()
    if sums_SNB.shape[-2] > 1:
        before_SN = F.pad(sums_by_blocks(sums_SNB.select(-1, -1)), (1, -1))
        sums_SNB = sums_SNB + before_SN.unsqueeze(-1)
    return sums_SNB.flatten(-2).narrow(-1, 0, num_values)

"""Sampling: from logits to tokens and their log-probabilities.

Nothing here has state. The random number of a token is a hash of (seed, sequence, position), so a draw does not depend
on the rank, the batch or the order.

Shapes: S sequences, V vocabulary, N blocks of B numbers each.
"""

import hashlib
import struct
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.parallel.staging import in_one_copy
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


# ---- Rows that are drawn together, and the numbers that a device needs of them


def _numbers() -> "array[int]":
    # Lists of a whole text's tokens take ten times as long to become a tensor.
    return array("q")


@dataclass(frozen=True)
class _Places:
    """Pairs of a row and a token."""

    rows: "array[int]" = field(default_factory=_numbers)
    tokens: "array[int]" = field(default_factory=_numbers)

    def add(self, row: int, tokens: Collection[int]) -> None:
        self.rows.extend(array("q", [row]) * len(tokens))
        self.tokens.extend(tokens)

    def tensor(self) -> Tensor:
        """The pairs [2, N]; there has to be one."""
        return torch.stack([torch.frombuffer(numbers, dtype=torch.int64) for numbers in (self.rows, self.tokens)])


@dataclass(frozen=True, eq=False)
class JointDraw:
    """Draws of one recipe; seeds and lengths may differ.

    numbers: by name. Places are pairs [2, N] of a row of this draw and a token.
    """

    params: SamplingParams
    numbers: Mapping[str, Tensor]

    @classmethod
    def of(cls, draws: Sequence[Draw], rows: Sequence[int] | None) -> "JointDraw":
        """The draw of these rows; None for all. Its numbers are on the host."""
        params, numbers = draws[0].params, dict[str, Tensor]()
        if params.reads_answer or any(
            draw.params.begins_with or draw.position < draw.params.min_new_tokens for draw in draws
        ):
            numbers = _edits(params, draws)
        if params.biases:
            tokens, values = zip(*params.biases, strict=True)
            numbers |= {"biased": torch.tensor(tokens), "biases": torch.tensor(values, dtype=torch.float32)}
        if rows is not None:
            numbers["rows"] = torch.tensor(rows)
        if params.temperature:
            numbers["uniforms"] = torch.tensor([[draw.uniform()] for draw in draws], dtype=torch.float64)
        return cls(params, numbers)


def _edits(params: SamplingParams, draws: Sequence[Draw]) -> dict[str, Tensor]:
    """The places of tokens that are repeated, counted, excluded or given, and what the counted ones lose."""
    lost = list[float]()
    repeated, counted, excluded, given = (_Places() for _ in range(4))
    has_counts = bool(params.presence_penalty or params.frequency_penalty)
    for row, draw in enumerate(draws):
        if params.reads_answer and params.repetition_penalty != 1.0:
            repeated.add(row, {*draw.prompt, *draw.answer})
        # What the answer is given to begin with counts as its prompt does.
        if has_counts and (counts := Counter(draw.answer[len(draw.params.begins_with) :])):
            counted.add(row, counts)
            lost += [params.presence_penalty + params.frequency_penalty * count for count in counts.values()]
        if params.bad_words:
            excluded.add(row, [last for *before, last in params.bad_words if draw.ends_with(before)])
        if draw.position < draw.params.min_new_tokens:
            excluded.add(row, params.end_tokens)
        if draw.given is not None:
            given.add(row, [draw.given])
    places = {"repeated": repeated, "counted": counted, "excluded": excluded, "given": given}
    numbers = {name: found.tensor() for name, found in places.items() if found.rows}
    if lost:
        numbers["lost"] = torch.tensor(lost, dtype=torch.float32)
    return numbers


def joint_draws(draws: Sequence[Draw]) -> list[JointDraw]:
    """The draws by recipe, with their numbers on the host."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for row, draw in enumerate(draws):
        alike.setdefault(draw.params.recipe, []).append(row)
    if len(alike) == 1:
        return [JointDraw.of(draws, None)]
    return [JointDraw.of([draws[row] for row in rows], rows) for rows in alike.values()]


# ---- Penalties, biases and bad words: changes to the logits that depend on the prompt and on the answer so far


def penalised(logits_SV: Tensor, draw: JointDraw) -> Tensor:
    """The fp32 logits after biases, repetition, presence and frequency penalties, in this order.

    Last, what may not come is excluded: bad words, and end tokens that come too early.

    Source: biases, repetition penalty and bad words as transformers' logits processors (the penalty is that of Keskar
    et al. 2019, arXiv 1909.05858, section 4.1); presence and frequency penalties as OpenAI's API defines them.
    """
    numbers, penalty = draw.numbers, draw.params.repetition_penalty
    if numbers.keys().isdisjoint(("biased", "repeated", "counted", "excluded")):
        return logits_SV
    logits_SV = logits_SV.clone()
    if "biased" in numbers:
        logits_SV[:, numbers["biased"]] += numbers["biases"]
    if "repeated" in numbers:
        places = tuple(numbers["repeated"])
        values = logits_SV[places]
        logits_SV[places] = torch.where(values < 0, values * penalty, values / penalty)
    if "counted" in numbers:
        logits_SV[tuple(numbers["counted"])] -= numbers["lost"]
    if "excluded" in numbers:
        logits_SV[tuple(numbers["excluded"])] = logits_SV.new_full((), -torch.inf)
    return logits_SV


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
        """[S, `numbers_per_token`] int64 on the device; `unpacked` makes tokens of it, once it is on the host."""
        num = self.likeliest_SN.shape[1]
        numbers_SW = self.tokens.new_zeros(len(self.tokens), _NUM_PLAIN + 2 * num)
        numbers_SW[:, 0] = self.tokens
        of_numbers = numbers_SW.view(torch.float64)
        of_numbers[:, 1], of_numbers[:, 2] = self.log_probs, self.raw_log_probs
        if num:
            numbers_SW[:, _NUM_PLAIN : _NUM_PLAIN + num] = self.likeliest_SN
            of_numbers[:, _NUM_PLAIN + num : _NUM_PLAIN + 2 * num] = self.likeliest_log_probs_SN
        return numbers_SW


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
    joint = joint_draws(draws)
    tables = in_one_copy([draw.numbers for draw in joint], logits_SV.device)
    return draw_jointly(
        logits_SV, draws, [JointDraw(draw.params, numbers) for draw, numbers in zip(joint, tables, strict=True)]
    )


def draw_jointly(logits_SV: Tensor, draws: Sequence[Draw], joint: Sequence[JointDraw]) -> Drawn:
    """Draw a token for each row of the logits. joint: the draws as `joint_draws` gives them, on the logits' device."""
    num_rows, device = len(draws), logits_SV.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    log_probs, raw_log_probs = torch.zeros(2, num_rows, dtype=torch.float32, device=device)
    most = max(draw.params.top_log_probs for draw in draws)
    likeliest_SN, likeliest_log_probs_SN = tokens.new_empty(num_rows, 0), log_probs.new_empty(num_rows, 0)
    if most:
        precise_SV = logits_SV.float()
        likeliest_SN = largest(precise_SV, most)
        likeliest_log_probs_SN = precise_SV.log_softmax(-1).gather(-1, likeliest_SN)
    wants_mask = any(draw.params.filter_mask for draw in draws)
    dropped_SV = torch.zeros(logits_SV.shape, dtype=torch.bool) if wants_mask else None
    for draw in joint:
        numbers = draw.numbers
        at: Any = numbers.get("rows", slice(None))
        of_rows_SV = logits_SV[at].float()
        masked_SV = filtered(of_rows_SV, draw)
        final_SV = masked_SV.log_softmax(-1)
        # A row that is not finite may choose past the end; its log-probability then says so.
        chosen_S = _choose(masked_SV, final_SV, draw).clamp(max=logits_SV.shape[-1] - 1)
        if "given" in numbers:
            rows, given = numbers["given"]
            chosen_S[rows] = given
            final_SV[rows] = of_rows_SV[rows].log_softmax(-1)
        tokens[at] = chosen_S
        log_probs[at] = final_SV.gather(-1, chosen_S[:, None])[:, 0]
        if draw.params.raw_log_probs:
            raw_log_probs[at] = of_rows_SV.log_softmax(-1).gather(-1, chosen_S[:, None])[:, 0]
        if dropped_SV is not None:
            dropped_SV[at.cpu() if isinstance(at, Tensor) else at] = (masked_SV == -torch.inf).cpu()
    return Drawn(tokens, log_probs, raw_log_probs, dropped_SV, likeliest_SN, likeliest_log_probs_SN)


def filtered(logits_SV: Tensor, draw: JointDraw) -> Tensor:
    """The fp32 logits to draw from: divided by the temperature, with -inf for tokens that cannot be drawn.

    A greedy choice has neither temperature nor filters, but penalties, biases, bad words and end tokens that come too
    early.
    """
    params, logits_SV = draw.params, penalised(logits_SV, draw)
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
    if logits_SV.device.type != "cpu":
        # To sort all takes a device less than the host to wait for it.
        return logits_SV.sort(dim=-1, descending=True, stable=True).indices[:, :count]
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


def _choose(masked_SV: Tensor, final_SV: Tensor, draw: JointDraw) -> Tensor:
    if draw.params.temperature == 0:
        return masked_SV.argmax(-1)
    # In fp64: in fp32 the sum over a large vocabulary would lose the rare tokens.
    cumulative_SV = cumulative_(final_SV.double().exp_())
    chosen_S1 = torch.searchsorted(cumulative_SV, draw.numbers["uniforms"] * cumulative_SV[:, -1:], right=True)
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

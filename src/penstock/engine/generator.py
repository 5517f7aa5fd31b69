"""Generation with a pipeline: ranks agree on the prompts, the ring of stages decodes, and all ranks get the answers.

Shapes: B sequences, L tokens of the longest answer, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import schedule
from penstock.engine.answer_text import AnswerText, Decodes
from penstock.engine.batch_checks import check_callable
from penstock.engine.pipeline import Pipeline
from penstock.model import Limits
from penstock.parallel.host import gather_json, shown_to_all_ranks
from penstock.runtime import (
    DecodeForm,
    DecodeLoop,
    Decoders,
    HeaderRelay,
    PipelineError,
    Ring,
    Stage,
    host_channels,
)
from penstock.schedule import RingShape, Scheduler
from penstock.settings import Precision, RingConfig, SamplingParams

Prompts = Sequence[Sequence[int]]
OnToken = Callable[[int, int], object]
_MOST_QUOTED = 100

OnAnswer = Callable[[int, schedule.Sequence], object]


@dataclass(frozen=True)
class GenerateOptions(RingConfig):
    """The way in which sequences go round the ring; no option changes a token.

    Args:
        num_slots: groups of sequences under way at the same time; None for one a pipeline rank.
        rows_per_slot: sequences of a slot; None for all there are, at most `max_rows_per_slot`.
        max_rows_per_slot: that limit; each row has a place in the KV cache.
        prefill_tokens: prompt tokens that a slot reads in a round; prompts are cut at its multiples.
        refill: gives a free row to the next sequence at once; else only when all rows of its slot are free.
        packed: makes a copy of the weights for the time of the call, in the order in which they are read fastest; for
            fp32 on CPUs, where reading them takes most of the time. Elsewhere no copy is made.
        longest_first: begins with the sequences that may become longest; else all begin in the order given.
        decode: how rows compute one token each, a `DecodeForm` or its name. None for graphs where there is CUDA and
            for the live rows elsewhere. A model that cannot decode over fixed shapes (experts, layers of other
            libraries or shared by several ranks) decodes its live rows, and under autocast nothing is captured.
        skip: answers, by their number in the result, that are not made; they come back stopped and without a token.
            So a call can be continued whose other answers are then what they would have been.
        tokenizer: makes the text in which stop strings are looked for; that of `SamplingParams.stop` needs one.

    Raises:
        ValueError: a count is below one, or the form is unknown.

    >>> GenerateOptions(num_slots=2, decode="live-rows").refill
    True
    """

    refill: bool = True
    packed: bool = True
    longest_first: bool = True
    decode: DecodeForm | str | None = None
    skip: frozenset[int] = frozenset()
    tokenizer: Decodes | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.decode, str) and self.decode not in [form.value for form in DecodeForm]:
            forms = ", ".join(form.value for form in DecodeForm)
            raise ValueError(f"decode={self.decode!r}: possible are {forms}")

    def form(self, device: torch.device) -> DecodeForm:
        """The form of decoding on this device."""
        if self.decode is None:
            return DecodeForm.GRAPHS if device.type == "cuda" else DecodeForm.LIVE_ROWS
        return DecodeForm(self.decode)

    def shape(self, num_sequences: int, num_ranks: int) -> RingShape:
        """Slots and rows for this number of sequences."""
        num_slots = self.num_slots or num_ranks
        even = max(1, -(-num_sequences // num_slots))
        return RingShape(num_slots, self.rows_per_slot or min(even, self.max_rows_per_slot), self.prefill_tokens)


@dataclass(frozen=True, eq=False)
class Padded:
    """Answers side by side, [B, L] each: token ids int64, log-probabilities fp32 (0 after the end), and which count."""

    tokens: Tensor
    log_probs: Tensor
    valid: Tensor


@dataclass(frozen=True, eq=False)
class GenerateResult:
    """All answers, by prompt and sample, the same on every rank of the pipeline, and what they took.

    wall_s: from the first header to the last. busy_s, num_forwards: of each pipeline rank.
    """

    sequences: tuple[schedule.Sequence, ...]
    wall_s: float
    busy_s: tuple[float, ...]
    num_forwards: tuple[int, ...]
    num_rounds: int

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[schedule.Sequence]:
        return iter(self.sequences)

    def __getitem__(self, number: int) -> schedule.Sequence:
        return self.sequences[number]

    @property
    def num_tokens(self) -> int:
        """New tokens of all answers."""
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.wall_s if self.wall_s else 0.0

    @property
    def idle_share(self) -> float:
        """The fraction of the time in which a rank computed nothing, over all ranks of the pipeline."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.wall_s) if self.wall_s else 0.0

    def padded(self, pad_token: int | None = None) -> Padded:
        """The answers as tensors, filled up with `pad_token` on the right.

        Raises:
            ValueError: they are of different lengths, and no pad token is given.
        """
        lengths = [sequence.num_tokens for sequence in self.sequences]
        longest = max(lengths, default=0)
        if pad_token is None and any(length < longest for length in lengths):
            raise ValueError(
                f"the answers have {min(lengths)} to {longest} tokens; give a pad_token to fill them up with"
            )
        tokens = torch.full((len(lengths), longest), pad_token or 0, dtype=torch.int64)
        log_probs = torch.zeros(len(lengths), longest)
        for row, sequence in enumerate(self.sequences):
            tokens[row, : lengths[row]] = torch.tensor(sequence.tokens, dtype=torch.int64)
            log_probs[row, : lengths[row]] = torch.tensor(sequence.log_probs)
        valid = torch.arange(longest)[None] < torch.tensor(lengths, dtype=torch.int64)[:, None]
        return Padded(tokens, log_probs, valid)


class Generator:
    """Generates on a pipeline's stages, with the weights as they are."""

    #: stages, grid, transport and recorder
    _pipeline: Pipeline
    #: local stages with their KV caches, kept from call to call
    decoders: Decoders
    #: takes batches from other ranks ahead, in the running or last generation
    _relay: HeaderRelay | None

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._relay = pipeline, None
        # Of a bidirectional model, the stages of the first copy generate.
        stages = [stage for n, stage in sorted(pipeline.stages.items()) if n < pipeline.placement.stages_per_route]
        # Under autocast weights are read from casts, which do not outlive a call, so nothing is captured.
        captures = pipeline.options.precision is not Precision.BF16_AUTOCAST
        self.decoders = Decoders(stages, pipeline.boundary.dtype, pipeline.device, captures)
        pipeline.at_close(self.close)
        pipeline.recovery.around_renewal(undo=self._end_relay)

    @cached_property
    def ring(self) -> Ring:
        """Links to the other ranks; all of them open the channels of headers and tokens at the first call."""
        pipeline, cpu = self._pipeline, torch.device("cpu")
        host = pipeline.open_transport(host_channels(pipeline.placement), cpu)
        return Ring(
            pipeline.placement,
            pipeline.transport,
            host,
            pipeline.recorder,
            pipeline.device,
            lockstep=pipeline.layout.ep > 1,
            alarm=pipeline.recovery.alarm,
        )

    def release(self) -> None:
        """Free the memory of KV caches and graphs; the next call allocates anew."""
        self.decoders.release()

    def close(self) -> None:
        """Free memory, and stop helper threads."""
        self.release()
        if "ring" in vars(self):
            self.ring.host.close()

    def generate(
        self,
        prompts: Any,
        params: Any,
        options: GenerateOptions,
        on_token: OnToken | None = None,
        on_answer: OnAnswer | None = None,
    ) -> GenerateResult:
        """Answers to the prompts (token ids), in their order, on the stages and weights as they are.

        Ranks of one pipeline give the same prompts and parameters (one for all, or one for each), and all get the
        result. `on_token(number, token)` is called for each new token on the rank of the first stage, with the
        answer's number in the result, and where there are several stages in a thread beside the one that computes; if
        it returns true, that answer ends. `on_answer(number, answer)` is called for each answer as soon as it has
        ended, in the same place; its filter mask is only in the result.

        A token depends on the seed, its prompt, the number of its sample and its position, not on what else is
        generated nor on how. With shared experts (ep > 1) all ranks call it together, each pipeline with prompts of
        its own, or none.

        Raises:
            ValueError: the prompts or parameters are impossible; on all ranks alike, before any compute.
            PipelineError: the ranks of the pipeline were given different ones.
            StepError: on all ranks, when one has failed, in a listener for example; generation is possible again.
            TransportError: a peer did not send or receive in time.
        """
        recovery = self._pipeline.recovery
        with recovery.joined():
            sequences = self._agree(prompts, params, options, on_token, on_answer)
            self._pipeline.set_training(False)
            with recovery.alone(), self._pipeline.casts.kept(packed=options.packed), torch.inference_mode():
                result = self._generate(sequences, options, on_token, on_answer)
            self._end_together()
            return result

    def _end_together(self) -> None:
        """Wait for the ranks that hold the same stages: a listener may have failed on one of them alone."""
        layout, group = self._pipeline.layout, self._pipeline.grid.batch_control
        if layout.tp * layout.cp > 1:
            with self._pipeline.recorder.collective("end the generation", group):
                gather_json(None, group)

    def _generate(
        self,
        sequences: list[schedule.Sequence],
        options: GenerateOptions,
        on_token: OnToken | None,
        on_answer: OnAnswer | None,
    ) -> GenerateResult:
        pipeline, ring = self._pipeline, self.ring
        pipeline.begin_recording()
        shape = options.shape(len(sequences) - len(options.skip), pipeline.layout.pp)
        longest = max((len(s.prompt_tokens) + s.params.max_new_tokens for s in sequences), default=1)
        self.decoders.reserve(shape.num_rows, longest)
        if options.packed:
            self.decoders.pack_weights()
        scheduler = listeners = None
        if ring.rank == 0:
            any_goes_on = self._any_goes_on if ring.lockstep else None
            scheduler = Scheduler(sequences, shape, options.refill, options.longest_first, any_goes_on)
            scheduler.stop(options.skip)
            stops = {s.number: AnswerText(options.tokenizer, s.params.stop) for s in sequences if s.params.stop}
            listeners = _Listeners(scheduler, on_token, on_answer, stops)
        decoders = self.decoders.of(options.form(pipeline.device))
        loop = DecodeLoop(ring, decoders, sequences, shape, scheduler, listeners and listeners.hear)
        self._relay = loop.relay
        loop.run()
        return self._result(loop)

    def _end_relay(self) -> None:
        """Let no thread of a failed generation use the links that come after."""
        if self._relay is not None:
            self._relay.join()

    # ---- before the loop

    def _agree(
        self, prompts: Any, params: Any, options: GenerateOptions, on_token: OnToken | None, on_answer: OnAnswer | None
    ) -> list[schedule.Sequence]:
        """The sequences to generate, once all ranks of the pipeline have been given the same.

        Pipelines that share experts, with prompts of their own, agree on the number of slots as well.
        """
        pipeline, grid = self._pipeline, self._pipeline.grid

        def check() -> tuple[tuple[Any, ...], list[Any]]:
            if not isinstance(options, GenerateOptions):
                raise ValueError(f"options={options!r} is a {type(options).__name__}; give GenerateOptions")
            check_callable("on_token", on_token, "number, token", optional=True)
            check_callable("on_answer", on_answer, "number, answer", optional=True)
            checked = _checked(prompts, params, list(pipeline.stages.values()), pipeline.units[0].limits)
            _check_skipped(options.skip, sum(own.num_samples for own in checked[1]))
            if options.tokenizer is None and any(own.stop for own in checked[1]):
                raise ValueError("stop is given as text, but no tokenizer; give one in GenerateOptions(tokenizer=...)")
            given = repr((checked, sorted(options.skip)))
            digest = hashlib.blake2b(given.encode(), digest_size=16).hexdigest()
            num_slots = options.num_slots or pipeline.layout.pp
            return (checked, digest, num_slots), [grid.dp_rank, digest, num_slots]

        group = grid.batch_control if pipeline.layout.ep == 1 else grid.control

        def gather(value: Any) -> list[Any]:
            with pipeline.recorder.collective("agree on the prompts", group):
                return gather_json(value, group)

        (checked, digest, num_slots), views = shown_to_all_ranks(
            check,
            gather,
            otherwise=PipelineError,
            message="rank {rank} of those that generate together cannot: {error}",
        )
        for rank, (dp_rank, theirs, their_slots) in enumerate(views):
            if dp_rank == grid.dp_rank and theirs != digest:
                raise PipelineError(
                    f"rank {rank} of those that generate together was given other prompts or parameters"
                )
            if their_slots != num_slots:
                raise PipelineError(
                    f"rank {rank} of those that generate together was given num_slots={their_slots}, not {num_slots}"
                )
        return schedule.Sequence.all_of(*checked)

    def _any_goes_on(self, goes_on: bool) -> bool:
        """True if any of the pipelines in lockstep has work left; called on the ranks of their first stages."""
        pipeline = self._pipeline
        num_left = torch.tensor([int(goes_on)], device=pipeline.device)
        with pipeline.recorder.collective("agree on whether to go on", pipeline.grid.ep_group):
            dist.all_reduce(num_left, group=pipeline.grid.ep_group)
        return bool(num_left)

    # ---- after the loop

    def _result(self, loop: DecodeLoop) -> GenerateResult:
        """The result on all ranks of the pipeline, once they have the answers."""
        pipeline, group, report = self._pipeline, self._pipeline.grid.pp_control, loop.report
        with pipeline.recorder.collective("hand out the sequences", group):
            loop.share_answers(group)
            reports = gather_json([report.busy_s, report.wall_s, report.num_forwards], group)
        busy_s, wall_s, num_forwards = zip(*reports, strict=True)
        return GenerateResult(tuple(loop.sequences), wall_s[0], busy_s, num_forwards, report.num_rounds)


@dataclass(frozen=True, eq=False)
class _Listeners:
    """Calls a user's functions on the rank of the first stage."""

    #: decides what is computed; stopped when a listener wants it
    scheduler: Scheduler
    #: called with the number of a sequence and its new token; if it returns true, the sequence ends
    on_token: OnToken | None
    #: called with the number of a sequence that has ended, and with the sequence
    on_answer: OnAnswer | None
    #: number of a sequence with stop strings -> its text, up to the first of them
    stops: Mapping[int, AnswerText]

    def hear(self, grown: list[schedule.Sequence]) -> None:
        """Report new tokens, and sequences that they have ended."""
        for sequence in grown:
            text = self.stops.get(sequence.number)
            if text is not None:
                text.add(sequence.last_token)
                if text.stopped:
                    self.scheduler.stop([sequence.number])
            if self.on_token is not None and self.on_token(sequence.number, sequence.last_token):
                self.scheduler.stop([sequence.number])
            if self.on_answer is not None and sequence.ending is not None:
                self.on_answer(sequence.number, sequence)


def _checked(
    prompts: Any, params: Any, stages: Sequence[Stage], limits: Limits | None
) -> tuple[Prompts, list[SamplingParams]]:
    """The prompts as lists, and one of `params` for each. Raises: ValueError for what cannot be generated."""
    prompts = _token_ids(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    if isinstance(params, Mapping | str) or not isinstance(params, Iterable):
        raise ValueError(f"params={params!r} is a {type(params).__name__}; give SamplingParams, or a list of them")
    params = list(params)
    for number, own in enumerate(params):
        if not isinstance(own, SamplingParams):
            raise ValueError(f"params[{number}]={own!r} is a {type(own).__name__}; give SamplingParams")
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} SamplingParams were given for {len(prompts)} prompts; give one, or one for each"
        )
    for stage in stages:
        stage.check_cached()
    check_prompts(prompts, params, limits)
    return prompts, params


def _token_ids(prompts: Any) -> list[list[int]]:
    """The prompts as lists of numbers. Raises: ValueError naming the prompt that is anything else."""
    given = f"prompts={prompts!r}"[:_MOST_QUOTED]
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise ValueError(f"{given} is a {type(prompts).__name__}; give a list of prompts, each a list of token ids")
    found: list[list[int]] = []
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, Tensor) and prompt.dim() == 1 and not prompt.is_floating_point():
            prompt = prompt.tolist()
        if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable) or isinstance(prompt, Tensor):
            quoted = repr(prompt)[:_MOST_QUOTED]
            raise ValueError(f"prompt {number} is {quoted}, a {type(prompt).__name__}; give a list of token ids")
        found.append([])
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise ValueError(f"prompt {number} has {token!r} at its place {place}; token ids are whole numbers")
            found[-1].append(int(token))
    return found


def _check_skipped(skip: Set[int], num_answers: int) -> None:
    for number in sorted(skip):
        if not 0 <= number < num_answers:
            raise ValueError(f"skip names the answer {number}; there are {num_answers}, counted from 0")


def check_prompts(prompts: Prompts, params: Sequence[SamplingParams], limits: Limits | None) -> None:
    """Refuse prompts that a model of these limits cannot continue; None where the limits are not known.

    Raises:
        ValueError: naming the prompt, or the setting, and what would be possible.
    """
    for number, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; it needs at least one token to begin with")
        if min(prompt) < 0:
            raise ValueError(f"prompt {number} holds the token {min(prompt)}; tokens count from 0")
        if limits is None:
            continue
        if max(prompt) >= limits.vocab_size:
            known = f"the model knows 0 to {limits.vocab_size - 1}"
            raise ValueError(f"prompt {number} holds the token {max(prompt)}; {known}")
        named = {
            "end_tokens": own.end_tokens,
            "logit_bias": tuple(token for token, _ in own.biases),
            "bad_words": tuple(token for word in own.bad_words for token in word),
        }
        for name, tokens in named.items():
            if max(tokens, default=0) >= limits.vocab_size:
                raise ValueError(f"{name}={tokens}: the model knows 0 to {limits.vocab_size - 1}")
        if own.top_log_probs > limits.vocab_size:
            raise ValueError(f"top_log_probs={own.top_log_probs}: the model knows {limits.vocab_size} tokens")
        if own.min_new_tokens and len(set(own.end_tokens)) >= limits.vocab_size:
            raise ValueError(f"min_new_tokens={own.min_new_tokens}: every token is an end token, none could be drawn")
        if len(prompt) + own.max_new_tokens > limits.max_length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, and with max_new_tokens={own.max_new_tokens} more it would "
                f"pass the model's max_length={limits.max_length}"
            )

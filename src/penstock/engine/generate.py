"""Generation: what is checked and agreed on once, the ring of stages that does the work, and the results."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.engine.answers import Drawing, Leading, Listeners, Prompts, Request, answers
from penstock.engine.generated import GenerateResult
from penstock.engine.options import Precision
from penstock.engine.pipeline import Pipeline
from penstock.model import CacheSize, Limits, SamplingParams
from penstock.parallel.broadcast import broadcast_value
from penstock.parallel.exchange import gather_json
from penstock.runtime import (
    DecodeForm,
    DistributedTransport,
    FixedDecoder,
    InProcessHub,
    InProcessTransport,
    Journey,
    PipelineError,
    Ring,
    RingReport,
    host_channels,
    prepare_large_pages,
)
from penstock.schedule import Conductor, RingShape

_CACHE_STEP_TOKENS = 64


@dataclass(frozen=True)
class GenerateOptions:
    """How sequences go round the ring; none of it changes a token.

    Args:
        num_slots: groups of sequences under way at the same time; None for one a pipeline rank.
        rows_per_slot: sequences of a slot; None for all there are, at most `max_rows_per_slot`.
        max_rows_per_slot: that limit; each row has a place in the cache.
        prefill_tokens: how many tokens of prompts a slot reads in a round; prompts are cut at its multiples.
        refill: whether a row is given to the next sequence at once, or only when all of its slot are free.
        packed: whether a copy of the weights is made meanwhile, in the order in which they are read fastest; for fp32
            on CPUs, where reading them takes most of the time. Elsewhere there is none.
        longest_first: whether sequences that may become longest are begun first, or all in the order given.
        decode: how rows read one token each, see `DecodeForm`; a name will do. None for graphs where there is CUDA and
            else for the live rows alone. A model that can not decode over fixed shapes (experts, layers of others or
            shared by several ranks) decodes its live rows, and under autocast nothing is captured.
        skip: answers, by their number in the result, that are not made; they come back stopped and without a token. So
            a call can be continued whose other answers are then what they would have been.

    Raises:
        ValueError: a count below one, or an unknown form.
    """

    num_slots: int | None = None
    rows_per_slot: int | None = None
    max_rows_per_slot: int = 16
    prefill_tokens: int = 512
    refill: bool = True
    packed: bool = True
    longest_first: bool = True
    decode: DecodeForm | str | None = None
    skip: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        RingShape(self.num_slots or 1, self.rows_per_slot or 1, self.prefill_tokens)
        for name in ("num_slots", "rows_per_slot", "max_rows_per_slot"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if isinstance(self.decode, str) and self.decode not in [form.value for form in DecodeForm]:
            forms = ", ".join(form.value for form in DecodeForm)
            raise ValueError(f"decode={self.decode!r}: possible are {forms}")

    def form(self, device: torch.device) -> DecodeForm:
        """How rows are decoded on this device."""
        if self.decode is None:
            return DecodeForm.GRAPHS if device.type == "cuda" else DecodeForm.LIVE_ROWS
        return DecodeForm(self.decode)

    def shape(self, num_sequences: int, num_ranks: int) -> RingShape:
        num_slots = self.num_slots or num_ranks
        even = max(1, -(-num_sequences // num_slots))
        return RingShape(num_slots, self.rows_per_slot or min(even, self.max_rows_per_slot), self.prefill_tokens)


class Generator:
    """Generates on a pipeline; its place in the ring and its caches are kept from call to call."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._caches: dict[int, list[Any]] = {}
        self._fixed: dict[DecodeForm, dict[int, FixedDecoder]] = {}
        self._size: CacheSize | None = None
        self._aside: torch.cuda.Stream | None = None
        group = pipeline.grid.pp_control
        if group is None:
            self.host = InProcessTransport(InProcessHub(), 0)
        else:
            host, cpu = host_channels(pipeline.placement), torch.device("cpu")
            self.host = DistributedTransport(host, group, cpu, pipeline.options.timeout_s)
        pipeline.at_close(self.close)
        self.ring = Ring(
            pipeline.placement,
            pipeline.stages,
            pipeline.transport,
            self.host,
            pipeline.recorder,
            device=pipeline.device,
        )

    def release(self) -> None:
        """Give back the memory of caches and graphs; the next call allocates anew."""
        for decoders in self._fixed.values():
            for decoder in decoders.values():
                decoder.release()
        self._fixed = {}
        self._caches, self._size = {}, None

    def close(self) -> None:
        self.release()
        if isinstance(self.host, DistributedTransport):
            self.host.close()

    def generate(
        self, prompts: Prompts, params: Sequence[SamplingParams], options: GenerateOptions, listeners: Listeners
    ) -> GenerateResult:
        """Answers to the prompts, in their order, on the stages and weights as they are; one of `params` for each.

        Ranks of one pipeline give the same prompts and parameters, and all get the result. `on_token(number, token)` is
        called for each new token on the rank of the first stage, with the answer's number in the result, and where
        there are several stages in a thread beside the one that computes; where it returns true that answer ends.
        `on_answer(number, answer)` is called for each answer as soon as it has ended, in the same place; its filter
        mask is only in the result.

        A token depends on the seed, its prompt, which sample it belongs to and its position, not on what else is
        generated nor on how. With shared experts (ep > 1) all ranks call it together, each pipeline with prompts of its
        own, or none.

        Raises:
            TransportError: a peer did not send or receive in time.
        """
        with self._pipeline.casts.kept(packed=options.packed):
            return self._generate(prompts, params, options, listeners)

    @torch.inference_mode()
    def _generate(
        self, prompts: Prompts, params: Sequence[SamplingParams], options: GenerateOptions, listeners: Listeners
    ) -> GenerateResult:
        pipeline = self._pipeline
        pipeline.begin_recording()
        requests = Request.all_of(prompts, params)
        shape = options.shape(len(requests) - len(options.skip), pipeline.layout.pp)
        lengths = [len(prompts[r.prompt]) + r.params.max_new_tokens for r in requests]
        self._reserve(shape.num_rows, max(lengths, default=1))
        if options.packed:
            self._pack_weights()
        lead = None
        if self.ring.rank == 0:
            wishes = [request.wish(prompts) for request in requests]
            conductor = Conductor(wishes, shape, options.refill, options.longest_first)
            conductor.stop(options.skip)
            lead = Leading(prompts, requests, conductor, listeners, self._goes_on if self._in_step else None)
        drawing = Drawing(prompts, requests) if self.ring.rank == self.ring.drawer else None
        fixed = self._fixed_decoders(options.form(pipeline.device))
        drawn = drawing and drawing.draw
        journey = Journey(shape, self._caches, drawn, lead and lead.lead, self._in_step, fixed)
        report = self.ring.run(journey)
        return self._result(requests, lead, drawing, report)

    @property
    def _in_step(self) -> bool:
        """Whether this pipeline generates together with those it shares experts with."""
        return self._pipeline.layout.ep > 1

    def _goes_on(self, any_left: bool) -> bool:
        """Whether any of the pipelines that keep in step has anything left; asked where their first stages are."""
        pipeline = self._pipeline
        num_left = torch.tensor([int(any_left)], device=pipeline.device)
        with pipeline.recorder.collective("agree on whether to go on", pipeline.grid.ep_group):
            dist.all_reduce(num_left, group=pipeline.grid.ep_group)
        return bool(num_left)

    def _reserve(self, num_rows: int, num_tokens: int) -> None:
        """Make sure of caches of this size: those there are, if they are large enough."""
        kept, dtype = self._size, self._pipeline.boundary.dtype
        if kept is not None and kept.num_rows >= num_rows and kept.num_tokens >= num_tokens:
            return
        self.release()
        num_tokens = -(-num_tokens // _CACHE_STEP_TOKENS) * _CACHE_STEP_TOKENS
        size = CacheSize(num_rows, num_tokens, dtype, self._pipeline.device)
        self._caches = {stage.index: stage.new_caches(size) for stage in self.ring.stages}
        self._size = size

    def _pack_weights(self) -> None:
        """Pack them here, while nothing is waited for, and not one by one as the first prompts come."""
        if self._pipeline.device.type == "cpu":
            prepare_large_pages(sum(stage.weight_bytes for stage in self.ring.stages))
        for stage in self.ring.stages:
            stage.pack_weights()

    def _fixed_decoders(self, form: DecodeForm) -> dict[int, FixedDecoder]:
        """By stage who decodes over fixed shapes: kept, with what it has captured, as long as the caches are."""
        if form is DecodeForm.LIVE_ROWS or self._size is None:
            return {}
        if form not in self._fixed:
            # Under autocast weights are read from casts, which do not outlive a call.
            plain = self._pipeline.options.precision is not Precision.BF16_AUTOCAST
            captures = form is DecodeForm.GRAPHS and self._pipeline.device.type == "cuda" and plain
            if captures and self._aside is None:
                # Kept, for libraries set up a workspace for each stream.
                self._aside = torch.cuda.Stream()
            aside = self._aside if captures else None
            self._fixed[form] = {
                stage.index: FixedDecoder(stage, self._caches[stage.index], self._size.num_tokens, aside)
                for stage in self.ring.stages
                if FixedDecoder.takes(stage)
            }
        return self._fixed[form]

    def _result(
        self, requests: list[Request], lead: Leading | None, drawing: Drawing | None, report: RingReport
    ) -> GenerateResult:
        """Hand what the leading rank has heard to all ranks of the pipeline."""
        pipeline, group = self._pipeline, self._pipeline.grid.pp_control
        with pipeline.recorder.collective("hand out the sequences", group):
            told = broadcast_value(lead and lead.told(), 0, group)
            masks: list[Tensor] = []
            if any(request.params.filter_mask for request in requests):
                masks = broadcast_value(drawing and drawing.told(), self.ring.drawer, group)
            reports = gather_json([report.busy_s, report.wall_s, report.num_forwards], group)
        if lead is not None and lead.error is not None:
            raise lead.error
        busy_s, wall_s, num_forwards = zip(*reports, strict=True)
        sequences = answers(requests, told, masks)
        return GenerateResult(sequences, wall_s[0], busy_s, num_forwards, report.num_rounds)


def check_requests(
    pipeline: Pipeline, prompts: Any, params: Any, options: GenerateOptions
) -> tuple[Prompts, list[SamplingParams]]:
    """The prompts and their parameters, one for each, once all ranks of a pipeline hold the same.

    Pipelines that share experts agree as well, each with prompts of its own, on the number of slots.

    Raises:
        ValueError: what can not be generated from, on every rank that was given it; before any compute.
        PipelineError: another rank was given something else.
    """
    error, found, digest = None, None, ""
    grid, num_slots = pipeline.grid, options.num_slots or pipeline.layout.pp
    try:
        found = _checked(pipeline, prompts, params)
        _check_skipped(options.skip, sum(own.num_samples for own in found[1]))
        told = repr((found, sorted(options.skip)))
        digest = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()
    except ValueError as caught:  # told to all ranks, then raised here: nobody may wait for this rank
        error = caught
    group = grid.batch_control if pipeline.layout.ep == 1 else grid.control
    with pipeline.recorder.collective("agree on the prompts", group):
        told = gather_json([grid.dp_rank, digest, num_slots, error and str(error)], group)
    if error is not None:
        raise error
    for rank, (dp_rank, theirs, their_slots, refusal) in enumerate(told):
        if refusal is not None:
            raise PipelineError(f"rank {rank} of those that generate together can not: {refusal}")
        if dp_rank == grid.dp_rank and theirs != digest:
            raise PipelineError(f"rank {rank} of those that generate together was given other prompts or parameters")
        if their_slots != num_slots:
            raise PipelineError(
                f"rank {rank} of those that generate together was given num_slots={their_slots}, not {num_slots}"
            )
    assert found is not None
    return found


def _checked(pipeline: Pipeline, prompts: Any, params: Any) -> tuple[Prompts, list[SamplingParams]]:
    prompts = [[int(token) for token in prompt] for prompt in prompts]
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    params = list(params)
    if len(params) != len(prompts):
        raise ValueError(
            f"{len(params)} SamplingParams were given for {len(prompts)} prompts; give one, or one for each"
        )
    for stage in pipeline.stages.values():
        stage.check_cached()
    check_prompts(prompts, params, pipeline.units[0].limits)
    return prompts, params


def _check_skipped(skip: Set[int], num_answers: int) -> None:
    for number in sorted(skip):
        if not 0 <= number < num_answers:
            raise ValueError(f"skip names the answer {number}; there are {num_answers}, counted from 0")


def check_prompts(prompts: Prompts, params: Sequence[SamplingParams], limits: Limits | None) -> None:
    """Refuse what a model of these limits can not continue; None where they are not known.

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
        if any(token >= limits.vocab_size for token in own.end_tokens):
            raise ValueError(f"end_tokens={own.end_tokens}: the model knows 0 to {limits.vocab_size - 1}")
        if own.min_new_tokens and len(set(own.end_tokens)) >= limits.vocab_size:
            raise ValueError(f"min_new_tokens={own.min_new_tokens}: every token is an end token, none could be drawn")
        if len(prompt) + own.max_new_tokens > limits.max_length:
            raise ValueError(
                f"prompt {number} has {len(prompt)} tokens, and with max_new_tokens={own.max_new_tokens} more it would "
                f"pass the model's max_length={limits.max_length}"
            )

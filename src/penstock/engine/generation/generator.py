"""Generation with a pipeline: ranks agree on the prompts, the ring of stages decodes, and all ranks get the answers.

A prompt becomes tokens in the order of these files. `Generator.generate` is given prompts and `GenerateOptions`
(options.py). `_agree` reads the prompts (prompts.py), compares them with those of other ranks, and makes a
`schedule.Sequence` for each answer. `_begin` gives the sequences to the `Scheduler` of the first rank
(schedule/generation/scheduler.py), and hooks in the user's functions (listeners.py). `_run` starts a `DecodeLoop`
(runtime/decode/loop.py): batch after batch, the scheduler chooses sequences, the stages compute with their KV caches
(runtime/decode/decoders.py), and each sequence gets its next token; other ranks learn of a batch from its header
(runtime/decode/relay.py). At the end all ranks have the answers, as a `GenerateResult` (answers.py). A server's loop
takes its sequences from a `RequestQueue` (requests.py) instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from penstock import schedule
from penstock.engine.generation.answers import NOT_FINITE, AnswerText, GenerateResult
from penstock.engine.generation.listeners import AgreedInterrupt, Listeners
from penstock.engine.generation.options import GenerateOptions
from penstock.engine.generation.prompts import read_prompts
from penstock.engine.generation.requests import RequestQueue
from penstock.engine.pipeline import Pipeline
from penstock.model import cache_dtype
from penstock.parallel.host import gather_json, gather_on_all_ranks, meet
from penstock.runtime import DecodeLoop, Decoders, Generation, PipelineError, Ring, host_channels
from penstock.runtime.transport import unique_number
from penstock.schedule import Ending, RingShape, Scheduler
from penstock.settings import Precision
from penstock.settings.declare import check_argument

_KEPT_RECORDS = 1024
"""Records kept of a server's generation; a longer trace would only take memory."""


class Generator:
    """Generates on a pipeline's stages, with the weights as they are."""

    #: the model, cut into stages
    _pipeline: Pipeline
    #: local stages with their KV caches, kept from call to call
    decoders: Decoders
    #: the running or last decode loop, whose thread may take headers ahead
    _loop: DecodeLoop | None
    #: the generation that was interrupted, with its options; None if the last one was not
    _interrupted: tuple[Generation, GenerateOptions] | None

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline, self._loop, self._interrupted = pipeline, None, None
        # In a bidirectional model the stages of the first copy generate.
        stages = [stage for n, stage in sorted(pipeline.model.stages.items()) if not pipeline.placement.route_of(n)]
        # Under autocast weights are read from casts, which do not outlive a call, so nothing is captured.
        is_autocast = pipeline.options.precision is Precision.BF16_AUTOCAST
        captures = pipeline.device.type == "cuda" and not is_autocast
        # Keys and values come out of products.
        dtype = cache_dtype(torch.bfloat16 if is_autocast else pipeline.boundary.dtype, pipeline.device.type)
        self.decoders = Decoders(stages, dtype, pipeline.device, captures)
        # No thread of a failed generation uses the links that come after.
        pipeline.recovery.around_renewal(undo=lambda: self._loop.relay.join() if self._loop is not None else None)

    @cached_property
    def ring(self) -> Ring:
        """The links to the other ranks; all ranks open the channels of headers and tokens at the first call."""
        pipeline, cpu = self._pipeline, torch.device("cpu")
        host = pipeline.surroundings.transport(pipeline, host_channels(pipeline.placement), cpu)
        return Ring(
            pipeline.placement,
            pipeline.transport,
            host,
            pipeline.recorder,
            pipeline.device,
            lockstep=pipeline.layout.ep > 1,
            alarm=pipeline.recovery.alarm,
        )

    def generate(self, prompts: Any, params: Any, options: GenerateOptions, listeners: Listeners) -> GenerateResult:
        """Answers to the prompts, on the stages and weights as they are; see `Engine.generate`."""
        recovery = self._pipeline.recovery
        with recovery.joined():
            self._interrupted = None
            sequences, shape = self._agree(prompts, params, options, listeners)
            with recovery.announcing():
                generation = self._begin(sequences, shape, options, listeners)
            return self._decode(generation, options)

    def _agree(
        self, prompts: Any, params: Any, options: GenerateOptions, listeners: Listeners
    ) -> tuple[list[schedule.Sequence], RingShape]:
        """The sequences to generate, once all ranks of the pipeline are known to have the same prompts and parameters.

        Their slots and rows are those that the rank with the least memory has room for. Pipelines that share experts
        have prompts of their own, and must have as many slots.
        """
        pipeline, grid = self._pipeline, self._pipeline.grid
        group = grid.batch_control if pipeline.layout.ep == 1 else grid.control
        sequences: list[schedule.Sequence] = []

        def check() -> list[Any]:
            check_argument("options", options, GenerateOptions)
            listeners.check(pipeline.layout)
            self._check_first_stage()
            stages, limits = list(pipeline.model.stages.values()), pipeline.units[0].limits
            token_lists, samplings = read_prompts(prompts, params, stages, limits)
            num_answers = sum(sampling.num_samples for sampling in samplings)
            for number in sorted(options.skip):
                if not 0 <= number < num_answers:
                    raise ValueError(f"skip names the answer {number}; there are {num_answers}, counted from 0")
            if options.tokenizer is None and any(sampling.stop for sampling in samplings):
                raise ValueError("stop is given as text, but no tokenizer; give one in GenerateOptions(tokenizer=...)")
            agrees_on_interrupt = listeners.interrupt is not None and pipeline.layout.tp * pipeline.layout.cp > 1
            shape = options.shape(num_answers - len(options.skip), pipeline.layout.pp)
            form = (shape, options.refill, options.longest_first, options.decode)
            text = repr((token_lists, samplings, sorted(options.skip), agrees_on_interrupt, form))
            digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
            sequences.extend(schedule.Sequence.all_of(token_lists, samplings))
            return [grid.dp_rank, digest, shape.num_slots, self.decoders.room(_longest(sequences))]

        views = gather_on_all_ranks(
            check,
            group,
            otherwise=PipelineError,
            message="rank {rank} of those that generate together cannot: {error}",
            within=pipeline.recorder.collective("agree on the prompts", group),
        )
        _, digest, num_slots, _ = views[0 if group is None else group.rank()]
        for rank, (dp_rank, rank_digest, rank_slots, _) in enumerate(views):
            if rank_slots != num_slots:
                raise PipelineError(
                    f"rank {rank} of those that generate together was given num_slots={rank_slots}, not {num_slots}"
                )
            if dp_rank == grid.dp_rank and rank_digest != digest:
                raise PipelineError(
                    f"rank {rank} of those that generate together was given other prompts, parameters or options"
                )
        room = min((rank_room for *_, rank_room in views if rank_room is not None), default=None)
        return sequences, options.shape(len(sequences) - len(options.skip), pipeline.layout.pp, room)

    def _check_first_stage(self) -> None:
        """Check that the first stage lies on the rank that takes requests. Raises: ValueError."""
        if first_rank := self._pipeline.placement.rank_of(0):
            raise ValueError(
                f"generation begins on pipeline rank 0, but the schedule places the first stage on rank {first_rank}; "
                "give that rank's process the number 0"
            )

    def _begin(
        self, sequences: list[schedule.Sequence], shape: RingShape, options: GenerateOptions, listeners: Listeners
    ) -> Generation:
        ring, grid, layout = self.ring, self._pipeline.grid, self._pipeline.layout
        interrupt = listeners.interrupt
        interrupts: Callable[[], object] | None = interrupt
        if interrupt is not None and layout.tp * layout.cp > 1 and grid.batch_control is not None:
            # Among ranks that share layers the first asks for all.
            asked_here = interrupt if grid.tp_rank == grid.cp_rank == 0 else None
            interrupts = AgreedInterrupt(asked_here, unique_number(grid.batch_control), ring.alarm)
        if ring.rank > 0:
            return Generation(sequences, shape)

        def any_goes_on(goes_on: bool) -> bool:
            """True if any of the pipelines in lockstep has work left; the ranks of their first stages call it."""
            num_left = torch.tensor([int(goes_on)], device=ring.device)
            with ring.recorder.collective("agree on whether to go on", grid.ep_group):
                dist.all_reduce(num_left, group=grid.ep_group)
            return bool(num_left)

        agree = any_goes_on if ring.lockstep else None
        scheduler = Scheduler(sequences, shape, options.refill, options.longest_first, agree, ring.late(shape))
        scheduler.stop(options.skip)
        texts = {s.number: AnswerText(options.tokenizer, s.params.stop) for s in sequences if s.params.stop}
        listens = texts or listeners.on_token is not None or listeners.on_answer is not None
        listen = partial(listeners.report, scheduler, texts) if listens else None
        return Generation(sequences, shape, scheduler, listen, interrupts=interrupts)

    def _decode(self, generation: Generation, options: GenerateOptions) -> GenerateResult:
        """Decode until the end of a call or its next interruption."""
        pipeline = self._pipeline
        pipeline.model.set_training(False)
        with pipeline.recovery.announcing(), pipeline.model.casts.kept(), pipeline.kernels(), torch.inference_mode():
            loop = self._run(generation, options, _longest(generation.sequences))
            group = pipeline.grid.pp_control
            with pipeline.recorder.collective("hand out the sequences", group):
                loop.share_answers(group)
                timings = gather_json([loop.busy_s, loop.wall_s, loop.num_forwards], group)
        busy_s, wall_s, num_forwards = zip(*timings, strict=True)
        if pipeline.device.type == "cuda":
            # Times of launching.
            busy_s = ()
        answers = tuple(loop.generation.sequences)
        result = GenerateResult(answers, wall_s[0], busy_s, num_forwards, loop.num_rounds)
        # A listener may have failed on one of the ranks that hold the same stages alone.
        layout, group = pipeline.layout, pipeline.grid.batch_control
        if layout.tp * layout.cp > 1:
            with pipeline.recorder.collective("end the generation", group):
                meet(group)
        if isinstance(generation.interrupts, AgreedInterrupt):
            generation.interrupts.forget()
        self._interrupted = None if result.is_complete else (generation, options)
        for answer in answers:
            if answer.ending is Ending.NOT_FINITE:
                # The next call's masks would not hide what is left in the caches.
                self.release()
                raise ValueError(f"the logits of sequence {answer.number} {NOT_FINITE}")
        return result

    def _run(self, generation: Generation, options: GenerateOptions, longest: int) -> DecodeLoop:
        """Run this rank's decode loop to its end; a row of the cache has room for `longest` tokens."""
        pipeline = self._pipeline
        pipeline.recorder.begin_step(pipeline.step)
        self.decoders.reserve(generation.shape.num_rows, longest)
        if options.packed:
            self.decoders.pack_weights(pipeline.model.casts)
        if generation.scheduler is not None:
            generation.scheduler.version = pipeline.step
        shape = generation.shape
        slots = [shape.rows_of(slot) for slot in range(shape.num_slots)]
        decoders = self.decoders.of(options.form(pipeline.device), slots)
        self._loop = loop = DecodeLoop(self.ring, decoders, generation)
        try:
            loop.run()
        except BaseException:
            # What is left in the caches may be no number, which the next call's masks would not hide.
            self.decoders.release()
            raise
        return loop

    # ---- other beginnings, and the end

    def resume(self, keep_caches: bool) -> GenerateResult:
        """Go on with the call that was interrupted last; see `Engine.resume`. All ranks of the pipeline call it."""
        with self._pipeline.recovery.joined():
            interrupted, self._interrupted = self._interrupted, None
            if interrupted is None:
                raise PipelineError("there is no generation to resume; the last one was not interrupted")
            generation, options = interrupted
            if generation.scheduler is not None and not keep_caches:
                generation.scheduler.read_again()
            return self._decode(generation, options)

    def serve(self, requests: RequestQueue | None, shape: RingShape, max_length: int, options: GenerateOptions) -> None:
        """Answer the requests of a queue until it is closed, on the stages and weights as they are.

        All ranks of the one pipeline call it together, the rank of the first stage with the queue. `shape` has the
        answers that are computed at the same time, each of at most `max_length` tokens with its prompt.

        Raises:
            ValueError: the layout has more than pipeline ranks, or the model cannot generate.
            StepError: on all ranks, when one has failed.
            TransportError: a peer did not send or receive in time.
        """
        pipeline, layout = self._pipeline, self._pipeline.layout
        if layout.world_size != layout.pp:
            raise ValueError(f"{layout} has more ranks than pipeline ranks; a queue of requests takes pp alone")
        with pipeline.recovery.joined():
            self._check_first_stage()
            for stage in pipeline.model.stages.values():
                stage.check_cached()
            pipeline.model.set_training(False)
            pipeline.recorder.keep(_KEPT_RECORDS)
            casts = pipeline.model.casts
            with pipeline.recovery.announcing(), casts.kept(), pipeline.kernels(), torch.inference_mode():
                generation = Generation((), shape)
                if requests is not None:
                    scheduler = Scheduler((), shape, late=self.ring.late(shape))
                    generation = Generation((), shape, scheduler, requests.report, requests.admit)
                self._run(generation, options, max_length)
                # As after a failed call: here the requests have failed one by one.
                self.decoders.release()

    def release(self) -> None:
        """Free the memory of KV caches and graphs; the next call allocates anew, and none can be resumed."""
        self._interrupted = None
        self.decoders.release()

    def close(self) -> None:
        self.release()
        if "ring" in vars(self):
            self.ring.host.close()


def _longest(sequences: Sequence[schedule.Sequence]) -> int:
    """The most tokens that a row may hold."""
    return max((len(s.prompt_tokens) + s.params.max_new_tokens for s in sequences), default=1)

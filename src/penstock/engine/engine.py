"""The engine: a model cut into stages over a grid of processes, with everything a step needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock import schedule
from penstock.data import NO_LABEL, MicroBatchSpec, PackedBatch
from penstock.engine.build import Ties, build_stages, cut_units, lend_weights, units_of_layers
from penstock.engine.context import ContextShares
from penstock.engine.extras import ExpertBalance
from penstock.engine.forward import AggregateFn, Outputs, PostHook, forward_batch
from penstock.engine.held import held_parameters, held_state
from penstock.engine.memory import held_bytes
from penstock.engine.normalise import Normalize
from penstock.engine.optimizer import Optimizer
from penstock.engine.options import EngineOptions, Precision
from penstock.engine.overlap import observe_stages
from penstock.engine.scaler import LossScaler
from penstock.engine.schedules import ScheduleChoice, forward_only
from penstock.engine.sharing import Sharing, UnitSource, units_for
from penstock.engine.timed_cut import timed_cut
from penstock.engine.train import LossFn, LossWeightFn, TrainResult, evaluate_batch, train_batch
from penstock.engine.unit_times import measure_units
from penstock.engine.zero import shared_out
from penstock.model import Logits, ModelGroups, SamplingParams, Shard, WeightCasts, cross_entropy_sum, share_casts
from penstock.parallel import GradientBuckets, Layout, sum_tied
from penstock.parallel.buckets import StateBytes
from penstock.parallel.parts import Held
from penstock.runtime import (
    Boundary,
    DistributedTransport,
    Executor,
    Feed,
    InProcessHub,
    InProcessTransport,
    Recorder,
    Transport,
    keep_freed_memory,
)
from penstock.schedule import Program, Timeline

if TYPE_CHECKING:
    from penstock.engine.answers import OnAnswer, OnToken
    from penstock.engine.config import RunConfig
    from penstock.engine.generate import GenerateOptions, Generator
    from penstock.engine.generated import GenerateResult
    from penstock.engine.pretrained import HuggingFaceForm

Finish = Callable[[Any, PackedBatch], Tensor]

_MOST_EXECUTORS = 64
"""Numbers of microbatches whose programs are kept; a budget of tokens may lead to any number."""


def token_cross_entropy(output: Logits, microbatch: PackedBatch) -> Tensor:
    """The sum of the tokens' cross entropies in nats; the default loss of a language model."""
    return cross_entropy_sum(output, microbatch["labels"].to(output.device))


def num_loss_tokens(microbatch: PackedBatch) -> float:
    """The number of tokens with a label: the weight that belongs to `token_cross_entropy`."""
    return float((microbatch["labels"] != NO_LABEL).sum())


class Engine:
    """Trains and evaluates a model given as a list of units.

    Every process of the layout constructs it at the same point, torch.distributed being initialised (a layout of one
    process needs none), and calls its methods in the same order. Nothing is global: several engines may live in one
    process.

    Args:
        units: the model in order, or a function that makes it from the groups it is shared by (`ModelGroups`), which a
            layout with tp, cp or ep needs; see `from_layers` for plain modules.
        hidden_size: width of the residual stream that travels between stages.
        layout: the grid of processes.
        options: schedule, precision, optimizer and the rest.

    Raises:
        ValueError: the layout does not fit the world, or the model can not be cut so.
        TransportError: a link between two ranks failed its test; the message names it.
    """

    def __init__(
        self,
        units: UnitSource,
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
    ) -> None:
        self.layout, self.options = layout or Layout(), options or EngineOptions()
        self.device = _device(self.options.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.grid = self.layout.connect(self.device, timedelta(seconds=self.options.timeout_s))
        self.context = ContextShares(self.grid.cp_group, self.device)
        groups = ModelGroups(self.grid.tp_group, self.grid.cp_group, self.grid.ep_group, self.options.attention)
        self.units = units_for(units, groups, self.layout)
        self.placement = self.options.choice.placement(self.layout.pp)
        self.cut, self.choice = self._cut(units, hidden_size)
        self.boundary = Boundary(hidden_size, self.options.precision.parameter_dtype, self.layout.tp)
        local = self.placement.stages_of(self.grid.pp_rank)
        self.stages = build_stages(self.units, self.cut, local, self.boundary, self.options, self.device)
        self.casts = WeightCasts()
        for stage in self.stages.values():
            for _, module in stage.units:
                share_casts(module, self.casts)
        self.gradients: dict[int, GradientBuckets] = {}
        self._ties = Ties.of(self.units, self.parameters(), self.placement.num_routes)
        loans = self._ties.loans(self.parameters())
        self.sharing = Sharing.of(self.units, self.parameters(), self.grid).lending(loans)
        if self.options.optimizer.zero:
            self.sharing = shared_out(self.sharing, self._ties.owners, self.grid)
        alone = self.layout.world_size == self.layout.pp
        self.recorder = Recorder(self.grid.pp_rank, place=None if alone else str(self.grid.place))
        observe_stages(self.stages.values(), self.recorder)
        self.gradients = {
            number: GradientBuckets(
                stage.named_parameters(),
                self.grid.dp_cp_group,
                reductions=self.sharing.reductions,
                follow=self.recorder.follow,
            )
            for number, stage in self.stages.items()
            if self.options.learns
        }
        for number, buckets in self.gradients.items():
            self.stages[number].weights_ready = self._settle if loans else buckets.settle
        lend_weights(self.parameters(), loans)
        self.balance = ExpertBalance(self.stages)
        self.optimizer = self._make_optimizer()
        self.transport = self._make_transport()
        self.step = 0
        self.stop_requested = False
        self.form: HuggingFaceForm | None = None
        self._executors: dict[tuple[bool, int], Executor] = {}
        self._generator: Generator | None = None

    # ---- making one

    @classmethod
    def from_config(cls, config: RunConfig | str | Path) -> Engine:
        """The engine that a run's settings describe, read from a TOML file or given.

        Raises:
            ValueError: the settings can not go together.
        """
        from penstock.data.tokenizer import load_tokenizer
        from penstock.engine.config_check import check
        from penstock.engine.config_file import read_config
        from penstock.engine.pretrained_settings import with_pretrained
        from penstock.engine.run_parts import run_engine

        settings = check(with_pretrained(read_config(config) if isinstance(config, str | Path) else config))
        tokenizer = load_tokenizer(settings.data.tokenizer, settings.data.end_token or False)
        return run_engine(settings, tokenizer.vocab_size)

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[nn.Module],
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
    ) -> Engine:
        """An engine for a user's own layers, with the weights they have.

        The first takes token ids [T], the last gives what the loss wants, and what goes from one to the next is
        [T, hidden_size]; a layer whose forward has a second argument is given the microbatch's `Sequences`.
        """
        return cls(units_of_layers(layers), hidden_size, layout, options)

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        native: bool = True,
    ) -> Engine:
        """An engine for the model in a Hugging Face folder; each rank reads the tensors it holds, and no others.

        With `native` the decoder runs it, if its family is one of those; else transformers' own layers do, whatever
        its family. See `penstock.engine.pretrained`.

        Raises:
            FileNotFoundError, ValueError: the folder can not be run so; on every rank alike, before anything is read.
        """
        from penstock.engine.pretrained import open_pretrained

        found = open_pretrained(path, native)
        engine = cls(found.units, found.hidden_size, layout, options)
        engine.form = found.form
        return engine

    def save_hf(self, path: str | Path, dtype: str | None = None, max_shard_bytes: int | None = None) -> None:
        """Write the model as a new Hugging Face folder that transformers loads; all ranks call it.

        `dtype`: "fp32", "fp64", "bf16" or "fp16"; None for that of the parameters. See `penstock.engine.export`.

        Raises:
            ValueError: the folder is there already, or the model is none of transformers'; on every rank alike.
        """
        from penstock.engine.export import MAX_SHARD_BYTES, ExportOptions, export_engine

        export_engine(self, path, ExportOptions(dtype, max_shard_bytes or MAX_SHARD_BYTES))

    @property
    def ties(self) -> Mapping[str, str]:
        """Parameters that are copies: full name -> that of the one that counts, in norms and in checkpoints."""
        return self._ties.owners

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Parameters of which this rank holds a part: full name -> which part."""
        return self.sharing.shards

    # ---- a step

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str = Normalize.GLOBAL,
    ) -> TrainResult:
        """One optimizer step; see `penstock.engine.train.train_batch`. Ranks of one pipeline give the same batch."""
        if not self.options.learns:
            raise ValueError("this engine was made with learns=False, to score and generate; make one that learns")
        spec = micro_batches or MicroBatchSpec(num=2 * self.layout.pp, allow_fewer=True)
        return train_batch(self, batch, loss_fn, loss_weight_fn, spec, Normalize.parse(normalize))

    def evaluate(
        self,
        batches: Iterable[PackedBatch],
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
    ) -> float:
        """The loss per unit of weight over all ranks' batches, the same on every rank; nothing is learned."""
        spec = micro_batches or MicroBatchSpec(num=2 * self.layout.pp, allow_fewer=True)
        loss = weight = 0.0
        with self.fixed_weights():
            for batch in batches:
                batch_loss, batch_weight = evaluate_batch(self, batch, loss_fn, loss_weight_fn, spec)
                loss, weight = loss + batch_loss, weight + batch_weight
        return loss / weight if weight else float("nan")

    def forward(
        self,
        batch: PackedBatch,
        post_hook: PostHook | None = None,
        aggregate_fn: AggregateFn | None = None,
        micro_batches: MicroBatchSpec | None = None,
        output_seqlens: Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> Any:
        """The model's outputs for a batch, or what the hooks make of them, in the order of the batch.

        Given on the rank of the last stage (with `broadcast` on all), None elsewhere; see `penstock.engine.forward`.
        """
        spec = micro_batches or MicroBatchSpec(num=2 * self.layout.pp, allow_fewer=True)
        with self.fixed_weights():
            return forward_batch(self, batch, spec, Outputs(post_hook, aggregate_fn, output_seqlens, broadcast))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: GenerateOptions | None = None,
        on_token: OnToken | None = None,
        on_answer: OnAnswer | None = None,
    ) -> GenerateResult:
        """Answers to the prompts (token ids), in their order, on the stages and weights as they are.

        Ranks of one pipeline give the same prompts and parameters (one for all, or one for each), and all get the
        result. `on_token(number, token)` is told of each new token on the rank of the first stage, with the answer's
        number in the result, and where there are several stages in a thread beside the one that computes; where it
        returns true that answer ends. `on_answer(number, answer)` is told of each answer as soon as it has ended, in
        the same place; its filter mask is only in the result.

        A token depends on the seed, its prompt, which sample it belongs to and its position, not on what else is
        generated nor on how. With shared experts (ep > 1) all ranks call it together, each pipeline with prompts of its
        own, or none.

        Raises:
            ValueError: what can not be generated; on all ranks alike, before any compute.
            PipelineError: the ranks of the pipeline were given different things.
            TransportError: a peer did not send or receive in time.
        """
        from penstock.engine.answers import Listeners
        from penstock.engine.generate import GenerateOptions, Generator, check_requests

        options = options or GenerateOptions()
        checked = check_requests(self, prompts, params, options)
        self._generator = self._generator or Generator(self)
        with self.casts.kept(packed=options.packed):
            return self._generator.generate(*checked, options, Listeners(on_token, on_answer))

    def fixed_weights(self) -> AbstractContextManager[None]:
        """Inside, weights that are computed with in another dtype (autocast) are cast once, by who needs them first.

        `forward`, `evaluate` and `generate` are such a pass each; a user's own may hold several of them. A training
        step inside is seen by what follows it.
        """
        return self.casts.kept()

    def release_caches(self) -> None:
        """Give back the memory that generation keeps for the next time."""
        if self._generator is not None:
            self._generator.release()

    def request_stop(self) -> None:
        """Ask all ranks to end after the next step: its `TrainResult.stop_requested` is true on each of them."""
        self.stop_requested = True

    # ---- what a step is made of

    @property
    def holds_first_stage(self) -> bool:
        return any(self.placement.is_first(number) for number in self.stages)

    @property
    def holds_last_stage(self) -> bool:
        return any(self.placement.is_last(number) for number in self.stages)

    @property
    def gives_results(self) -> bool:
        """Whether this rank is the one of its pipeline that gets what `forward` makes of a batch."""
        return self.grid.pp_rank == self.placement.rank_of(self.placement.stages_per_route - 1)

    def feed(self, microbatch: PackedBatch, finish: Finish) -> Feed:
        """What the executor needs of a microbatch; tokens and `finish` only where this rank holds that end.

        Here, and nowhere else, a microbatch is cut among context-parallel ranks: `finish` is given this rank's part and
        its logits; where ranks share the vocabulary, these are `ShardedLogits`.
        """
        own, sequences = self.context.share(microbatch)
        present = self.units[-1].present or _as_it_is
        return Feed(
            num_tokens=sequences.num_tokens,
            sequences=sequences,
            tokens=own["tokens"].to(self.device) if self.holds_first_stage else None,
            finish=(lambda output: finish(present(output), own)) if self.holds_last_stage else None,
        )

    def program(self, num_microbatches: int, training: bool = True) -> Program:
        """The program of a step of so many microbatches, or of as many forwards alone."""
        if training:
            shared = self.layout.shares_layers
            return self.choice.program(self.layout.pp, num_microbatches, whole_backwards=shared)
        return forward_only(self.placement, num_microbatches)

    def executor(self, num_microbatches: int, training: bool = True) -> Executor:
        """The executor of that program, proved once and kept; of very many, those used last."""
        key = (training, num_microbatches)
        found = self._executors.pop(key, None)
        if found is None:
            program = self.program(num_microbatches, training)
            found = Executor(
                program,
                self.grid.pp_rank,
                {n: stage for n, stage in self.stages.items() if n < program.placement.num_stages},
                self.transport,
                self.recorder,
                reduce=lambda number: self.gradients[number].launch(),
                pairs=self.options.pairs,
            )
        self._executors[key] = found
        if len(self._executors) > _MOST_EXECUTORS:
            del self._executors[next(iter(self._executors))]
        return found

    def zero_gradients(self) -> None:
        for buckets in self.gradients.values():
            buckets.zero_()

    def finish_gradients(self) -> None:
        """Wait for the reductions that the program started, then add up the copies of one parameter."""
        for buckets in self.gradients.values():
            buckets.wait()
        every = {name: view for buckets in self.gradients.values() for name, view in buckets.owned_gradients.items()}
        for ties in (self._ties.copies, self._ties.tied):
            sum_tied(ties, every, self.grid.mirror_group)

    def gather_parameters(self) -> None:
        """Where the optimizer's step is shared out, start giving the others this rank's results."""
        for buckets in self.gradients.values():
            buckets.gather()

    def sum_over_ranks(self, *values: float) -> list[float]:
        """The sums of the ranks' values, on every rank; exact where all but one rank give zero."""
        if self.grid.control is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        with self.recorder.collective("add up the loss"):
            dist.all_reduce(tensor, group=self.grid.control)
        return tensor.tolist()

    def total_loss(self, losses: Sequence[Tensor]) -> float:
        """The sum of all ranks' losses, on every rank; ranks of a tp group have the same ones, which count once."""
        own = float(torch.stack(list(losses)).sum()) if losses and self.grid.tp_rank == 0 else 0.0
        return self.sum_over_ranks(own)[0]

    # ---- what a step did

    def simulated(self, num_microbatches: int, costs: schedule.Costs) -> Timeline:
        """The simulated timeline of a step."""
        return schedule.simulate(self.program(num_microbatches), costs)

    def timeline(self) -> Timeline | None:
        """The measured timeline of the last step of pipeline 0, on rank 0; None elsewhere. All ranks call it.

        Ranks on one host share a clock; those of several hosts are aligned by it as well as the hosts are.
        """
        from penstock.engine.measured import gather_events

        return gather_events(self)

    # ---- state

    def parameters(self) -> dict[str, nn.Parameter]:
        """This rank's parameters by full name."""
        self._settle()
        return {name: p for stage in self.stages.values() for name, p in stage.named_parameters()}

    def gradient(self, name: str) -> Tensor:
        """The gradient of one of this rank's parameters, as the last step left it (a view).

        Where the optimizer's step is shared out (`zero`), only what this rank steps of it is summed over ranks.
        """
        return next(b.gradient(name) for b in self.gradients.values() if name in b.gradients)

    def state(self, optimizer: bool = True) -> dict[str, Held]:
        """What this rank holds of the parameters and the optimizer's state, by full name: copy into it to load."""
        held = held_parameters(self.parameters(), self.shards)
        return held | held_state(self.optimizer, self.shards) if optimizer else held

    def state_bytes(self) -> StateBytes:
        """What this rank's parameters, gradients and optimizer take of its memory."""
        return held_bytes(self.parameters().values(), list(self.gradients.values()), self.optimizer.state_bytes)

    def progress(self) -> dict[str, Any]:
        """What a resumed run must know beside `state`, as JSON values; the same on every rank."""
        return {"step": self.step, "optimizer": self.optimizer.progress()}

    def load_progress(self, progress: dict[str, Any]) -> None:
        """Go on from there, after the tensors of `state` have been loaded."""
        self.step = int(progress["step"])
        self.optimizer.load_progress(progress["optimizer"])

    def close(self) -> None:
        """Let go of helper threads; process groups belong to torch.distributed."""
        if self._generator is not None:
            self._generator.close()
        if isinstance(self.transport, DistributedTransport):
            self.transport.close()

    # ---- parts

    def _settle(self) -> None:
        """Wait for the parameters that other ranks step."""
        for buckets in self.gradients.values():
            buckets.settle()

    def _cut(self, units: UnitSource, hidden_size: int) -> tuple[tuple[range, ...], ScheduleChoice]:
        """The units of every stage, and the schedule, which may depend on how long they take."""
        lengths, choice = self.options.measure_lengths, self.options.choice
        if lengths is None or self.layout.pp == 1 or (self.options.cut is not None and not choice.is_searched):
            return cut_units(self.units, self.placement, self.options), choice
        # One rank measures, so the units as they are when nobody shares them: what counts is their proportions.
        alone = units_for(units, ModelGroups(), Layout())
        times = measure_units(alone, hidden_size, lengths, self.options, self.grid)
        return timed_cut(alone, hidden_size, self.placement, self.options, times)

    def _make_optimizer(self) -> Optimizer:
        scaler = LossScaler() if self.options.precision is Precision.FP16 else None
        return Optimizer(
            list(self.gradients.values()),
            self.options.optimizer,
            self.grid.control if self.options.optimizer.zero else self.grid.model_control,
            self.ties,
            scaler,
            self.sharing.pieces,
        )

    def _make_transport(self) -> Transport:
        if self.grid.pp_control is None:
            return InProcessTransport(InProcessHub(), 0)
        return DistributedTransport(self.placement, self.grid.pp_control, self.device, self.options.timeout_s)


def _as_it_is(output: Tensor) -> Tensor:
    return output


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(name)

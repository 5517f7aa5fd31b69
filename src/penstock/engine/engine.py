"""The engine: one model over a grid of processes, which trains, scores and generates."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self, cast

from torch import Tensor, nn

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import scoring
from penstock.engine.adapter import save_adapter, with_adapter
from penstock.engine.callbacks import Callbacks
from penstock.engine.checkpoint import Checkpointer, CheckpointReader
from penstock.engine.checkpoint.manifest import folder_name, random_state
from penstock.engine.folders.export import ExportOptions, export_model
from penstock.engine.folders.model_folder import open_folder
from penstock.engine.folders.run_parts import arguments_of_run
from penstock.engine.generation.answers import GenerateResult
from penstock.engine.generation.generator import Generator
from penstock.engine.generation.listeners import Interrupt, Listeners, OnAnswer, OnToken
from penstock.engine.generation.options import GenerateOptions
from penstock.engine.model_state import ModelState
from penstock.engine.options import EngineOptions, UnitSource, changed
from penstock.engine.own_layers import units_of_layers
from penstock.engine.pipeline import Pipeline
from penstock.engine.scoring import AggregateFn, OutputCollector, PostHook
from penstock.engine.training.loss import EvaluationLoss, LossFn, LossWeightFn, num_loss_tokens, token_cross_entropy
from penstock.engine.training.trainer import Trainer, TrainResult
from penstock.engine.weight_transfer import RemoteEngine, Slices, WeightEndpoint
from penstock.model.hf.families import HuggingFaceForm
from penstock.parallel import Grid
from penstock.parallel.grid import own_world_rank, world_ranks
from penstock.parallel.tensor_slice import TensorSlice, local_slices
from penstock.runtime import Recorder
from penstock.schedule import Timeline
from penstock.settings import Layout, Native, Normalize, RunConfig, SamplingParams, checked


class Engine(ModelState, WeightEndpoint):
    """One model over a grid of processes, which trains, scores and generates.

    Every process of the world constructs it at the same point, with torch.distributed initialised (one process needs
    none), and the processes of its layout call its methods in the same order. One process may have several engines.
    Most scripts make it by `Engine.from_layers`, `Engine.from_hf` or `Engine.from_config`.

    Args:
        units: the smallest pieces that stages are cut from, in order: embedding, attention blocks, MLP blocks, final
            norm and head. Or a function that makes them for the tensor-, context- and expert-parallel groups of this
            rank, which a layout with tp, cp or ep above 1 needs.
        hidden_size: width of the residual stream [tokens, hidden_size] that stages pass on.
        layout: the grid of processes, a `Layout`; left out, one process.
        options: schedule, precision, optimizer and the rest, as `EngineOptions`.
        form: the model's names and configuration in transformers, for `Engine.save_hf`.
        **changes: options by name, which replace those in `options`.

    Raises:
        ConfigError: an option is unknown, options exclude each other, or ranks were given different ones.
        ValueError: the layout does not fit the world, or the model cannot be cut into its stages.
        PipelineError: another rank could not build its part; the message says why.
        TransportError: a link between two ranks failed its test; the message names it.

    On a process outside of the layout the call returns a `RemoteEngine`, which only takes part in `send_weights`; its
    `is_here` is False.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> batch = PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
    >>> engine.train_batch(batch).num_tokens
    8
    """

    #: this rank's place and process groups in the layout
    grid: Grid
    #: records this rank's actions, and reports the current one
    recorder: Recorder
    #: the model's form in transformers; None if there is none
    form: HuggingFaceForm | None
    #: a user's own callbacks
    callbacks: Callbacks

    @checked
    def __new__(
        cls,
        units: UnitSource,
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        form: HuggingFaceForm | None = None,
        **changes: Any,
    ) -> Self:
        """An engine, or on a rank outside of the layout a `RemoteEngine`."""
        if own_world_rank() in world_ranks(layout := layout or Layout()):
            return super().__new__(cls)
        return cast(Self, RemoteEngine(layout, changed(options, changes)))

    def __init__(
        self,
        units: UnitSource,
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        form: HuggingFaceForm | None = None,
        **changes: Any,
    ) -> None:
        layout, options = layout or Layout(), changed(options, changes)
        if options.adapter is not None:
            units = with_adapter(units, options.adapter, form, layout)
        pipeline = Pipeline(units, hidden_size, layout, options)
        ModelState.__init__(self, pipeline, Trainer(pipeline))
        WeightEndpoint.__init__(self, layout, options, pipeline.grid.number, pipeline)
        self.grid, self.recorder, self.form = pipeline.grid, pipeline.recorder, form
        self.callbacks = Callbacks(pipeline)

    @classmethod
    def from_config(cls, config: RunConfig | str | Path) -> Self:
        """The engine of a run's settings or their TOML file. Raises: ConfigError for mistakes; as `Engine.from_hf`."""
        return cls(*arguments_of_run(config))

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[nn.Module | partial[Any]],
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        **changes: Any,
    ) -> Self:
        """An engine for a user's own layers, with the weights they have.

        The first layer takes the batch's `tokens`: ids [T], or anything else with T rows, such as images. Each layer
        gives [T, hidden_size] to the next one, and the last one gives the loss its input. A layer's `forward` may ask
        by name for `sequences`, any key of the batch, or the numbers `microbatch`, `num_microbatches` and `step`. A
        parameter that several layers hold is tied. The option `precision` casts fp32 parameters and buffers in place,
        and each plain `nn.Linear` becomes a linear layer of Penstock's, in place too.

        Args:
            layers: the modules in order, or for each a `functools.partial` that makes it on the rank that holds it,
                with random numbers of the option `seed` and the layer's index in any layout. All ranks also call the
                partial under `torch.device("meta")`, for names and shapes.
            hidden_size: width of the layers' outputs. The other arguments are those of `Engine`.

        Raises: ValueError if there is no layer, one is no module, or one with buffers stands twice; and as `Engine`.
        """
        return cls(units_of_layers(layers), hidden_size, layout, options, **changes)

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        native: Native = "auto",
        **changes: Any,
    ) -> Self:
        """An engine for the model in a folder; all processes call it at the same point.

        Args:
            path: a folder of Hugging Face files, or that of a run, whose newest intact checkpoint is read.
            layout: the grid of processes, a `Layout`; left out, one process.
            options: `EngineOptions`; left out, the defaults in the precision of the files.
            native: True for Penstock's own layers, False for those of transformers (which cannot be shared over tp,
                cp or ep); left out, Penstock's if they know the family. A run decides it itself.
            **changes: options by name.

        Raises:
            FileNotFoundError: the folder or one of its files is missing; like the next, on every process if on one.
            ValueError: the model cannot be run, or its files are damaged, wrong or pickles; and as `Engine`.
        """
        learns = changes.get("learns", options is None or options.learns)
        return cls(*open_folder(path, native).arguments_from_files(layout, options, learns=learns), **changes)

    # ---- training, scoring, generating

    def train_batch(
        self,
        batch: PackedBatch | Iterable[PackedBatch] | None,
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str | float = Normalize.GLOBAL,
        step: int | None = None,
    ) -> TrainResult:
        """Take one optimizer step; every rank calls it. Parameters are trained if they require a gradient now.

        Args:
            batch: this pipeline's part of the data, a `PackedBatch`; ranks of one pipeline give the same, data-parallel
                ranks each their own. Or microbatches of your own: a list, or an iterator or other iterable, from which
                they are drawn one by one during the step. Ranks without an end of the model may then give None.
            loss_fn: from the last stage's output (logits [T, V] of T tokens over V words) and the microbatch to the sum
                of its losses, a scalar with its graph; or a pair of that and any value, which comes back in
                `TrainResult.outputs`, or for a dict of `Metric` reduced in `TrainResult.metrics`. It may ask for
                numbers as layers do. Its parameters belong to the last layer. `Labels`, or a loss of torch such as
                `torch.nn.CrossEntropyLoss()`, takes labels [T] in place of the microbatch, and gives their mean or sum
                as its `reduction` says.
            loss_weight_fn: from a microbatch to its weight in the divisor of the loss.
            micro_batches: the split of the batch, a `MicroBatchSpec`, whose `num` an iterator needs; left out, into 8
                microbatches in any layout, or fewer for a batch of fewer items. Long pipelines idle less with more.
            normalize: the divisor of the loss: a `Normalize`, its name, or the number itself. An iterator needs the
                number or "token_per_microbatch", since its counts come too late for the others.
            step: the step's absolute number, on which rates depend; left out, one more than the last step's.

        Raises:
            ZeroLossWeight: the weights of all microbatches are 0. Like the next two, on all ranks alike, before
                anything is computed.
            PipelineError: ranks of one pipeline were given different batches, or the engine is closed.
            ValueError: the batch cannot be split or computed, or the engine was made with learns=False.
            StepError: on all ranks, if one has failed; the step has been undone, and the next one can be taken. (A
                single rank raises the exception itself.)
            TransportError: a peer did not send or receive in time.
        """
        result = self.trainer.train_batch(batch, loss_fn, loss_weight_fn, micro_batches, normalize, step)
        if self.pipeline.has_callbacks_anywhere and self.callbacks.notify("on_step", result):
            self.request_stop()
        return result

    def evaluate(
        self,
        batches: PackedBatch | Iterable[PackedBatch | Iterable[PackedBatch]],
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
    ) -> EvaluationLoss:
        """The loss per unit of weight over all ranks' batches, the same on every rank; no weight changes.

        The result is a float, also named `loss`, with `metrics` and `outputs` as in a step. The arguments are those of
        `Engine.train_batch`, with one batch or several. Ranks of one pipeline give the same batches; data-parallel
        ranks may give unequal numbers of them, unless they share experts (ep > 1).

        Raises: ZeroLossWeight if no token of any batch carries loss; else as `Engine.forward`.
        """
        loss = scoring.evaluate(self.pipeline, batches, loss_fn, loss_weight_fn, micro_batches)
        if self.pipeline.has_callbacks_anywhere and self.callbacks.notify("on_evaluation", self.step, loss):
            self.request_stop()
        return loss

    def forward(
        self,
        batch: PackedBatch | Iterable[PackedBatch] | None,
        post_hook: PostHook | None = None,
        aggregate_fn: AggregateFn | None = None,
        micro_batches: MicroBatchSpec | None = None,
        output_seqlens: Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> Any:
        """The model's outputs, or what hooks make of them, in the batch's order; every rank calls it.

        The rank of the last stage gets the result, the others None, unless `broadcast` is true.

        Args:
            batch: this pipeline's part of the data, or microbatches of your own, as in `train_batch`; ranks of one
                pipeline give the same.
            post_hook: called on the last stage with each microbatch's logits [T, V] and the microbatch, and on request
                with numbers as a loss; its result takes the place of the logits. None keeps all logits. Ranks that
                share sequences (cp) each get whole logits, unless the hook is a `PerToken`.
            aggregate_fn: from the results by item, in the order of the batch (by microbatch if they cannot be taken
                apart), to the return value; None joins them.
            micro_batches: a `MicroBatchSpec` that says how the batch is split; left out, as in `train_batch`.
            output_seqlens: rows of each item in the results, unless there is one per token, sequence or item.
            broadcast: True to give the result to all ranks of the pipeline.

        Raises:
            PipelineError: ranks of one pipeline were given different batches. Like the next, on all ranks alike, before
                anything is computed.
            ValueError: the batch cannot be split or computed. Also for results that do not fit its items, on the rank
                of the last stage, with a `PipelineError` on the others.
            StepError: on all ranks, if a hook or anything else has failed on one; the engine can be used further.
            TransportError: a peer did not send or receive in time.
        """
        collector = OutputCollector(post_hook, aggregate_fn, output_seqlens, broadcast)
        return scoring.forward(self.pipeline, batch, micro_batches, collector)

    def share_outputs(self, outputs: Sequence[Any]) -> Sequence[Any]:
        """Give the `outputs` of a step or an evaluation to all ranks of the pipeline; each calls it with its own.

        They may hold numbers, strings, None, dense tensors (which arrive in host memory), and tuples, lists and
        mappings, which arrive as plain ones.

        Raises: TypeError on all ranks if one has a value of another type.
        """
        self.check_call("share_outputs", outputs=(outputs, Sequence))
        return scoring.share_outputs(self.pipeline, outputs)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: GenerateOptions | None = None,
        on_token: OnToken | None = None,
        on_answer: OnAnswer | None = None,
        interrupt: Interrupt | None = None,
    ) -> GenerateResult:
        """Answers to the prompts, in their order.

        Ranks of one pipeline give the same prompts and parameters, and all get the result. A token depends on the seed,
        its prompt, sample and position, not on the other prompts, layout or options. Pipelines that share experts
        (ep > 1) call it together.

        Args:
            prompts: the token ids of each.
            params: `SamplingParams` for all prompts, or one for each; left out, the defaults.
            options: how to generate, as `GenerateOptions`.
            on_token: called with the answer's number in the result and each new token; if it returns true, that answer
                ends. This and the next two are called on the rank of the first stage, with several stages in a thread
                beside the one that computes.
            on_answer: called with the answer's number and the answer, as soon as it has ended.
            interrupt: called between tokens; once it returns true, `generate` ends with the answers as they are, and
                `Engine.resume` can go on with them.

        Raises:
            ValueError: prompts or parameters are impossible; on all ranks alike, before anything is computed. Also at
                the end, if logits were NaN or infinite.
            PipelineError: ranks of one pipeline were given different ones.
            StepError: on all ranks, if one has failed, in a listener for example; generation is possible again.
            TransportError: a peer did not send or receive in time.
        """
        listeners = Listeners(on_token, on_answer, interrupt)
        return self.generator.generate(prompts, params, options or GenerateOptions(), listeners)

    @cached_property
    def generator(self) -> Generator:
        """Generates for `generate`, `resume` and servers; made on first use."""
        return Generator(self.pipeline)

    def resume(self, keep_caches: bool = False) -> GenerateResult:
        """Go on with the last call of `generate` if it was interrupted, with the weights as they are now.

        The weights read prompts and tokens so far again, so that the next tokens are those of a generation that begins
        there. `keep_caches` keeps the older weights' keys and values, and costs nothing. Random numbers, listeners and
        options go on in either case; each token bears the version of the weights that it was drawn from.

        Raises: PipelineError if no call was interrupted, and all that `Engine.generate` raises.
        """
        return self.generator.resume(keep_caches)

    def release_caches(self) -> None:
        """Free the memory that generation keeps for its next call."""
        self.generator.release()

    # ---- the model on disk

    def save(self, path: str | Path, extra: Any = None, keep: int = 1) -> None:
        """Save the layers' state, optimizer, step and random numbers as a checkpoint in the folder; all ranks call it.

        The layers' state is their parameters, persistent buffers and extra state (`get_extra_state`). A crash leaves
        earlier checkpoints intact. `extra` is a JSON value of the caller's, such as a position in the data; `keep` is
        the number of newest checkpoints that stay.

        Raises: AnotherRun, ValueError, CheckpointError; on all ranks alike.
        """
        grid = self.pipeline.grid
        self.check_call("save", path=(path, str | Path), keep=(keep, int))
        with self.pipeline.recorder.collective("save a checkpoint"):
            state, checkpointer = self.state_to_save(), Checkpointer(path, grid, {}, keep, self.ties, standalone=True)
            values = {"engine": self.progress(), "random": random_state(), "extra": extra}
            checkpointer.save(self.step, state, values, wait=True)
        self.callbacks.notify("on_checkpoint", self.step, Path(path) / folder_name(self.step))

    def load(self, path: str | Path) -> Any:
        """Go on from the newest intact checkpoint in the folder, saved by any layout; returns its `extra`.

        The folder is that of `save`, that of a run's checkpoints, or a single checkpoint. An engine that does not learn
        skips the optimizer's state. Each rank gets its own `extra` if there are as many ranks as then, else rank 0's.

        Raises: FileNotFoundError, DamagedCheckpoint; ValueError for a checkpoint of another model. On all ranks alike,
        with nothing loaded, unless a layer or an optimizer of your own has refused its state: then load again.
        """
        self.check_call("load", path=(path, str | Path))
        reader = CheckpointReader(path, self.pipeline.grid, None, self.ties)
        with self.pipeline.recorder.collective("look for a checkpoint"):
            info = reader.existing()
        self.load_checkpoint(reader, info)
        return reader.restore(info, lambda values: values.get("extra"))

    def save_hf(self, path: str | Path, dtype: str | None = None, **options: Any) -> None:
        """Write the model as a new Hugging Face folder; all ranks call it.

        `path` is new or empty; `dtype` is "fp32", "fp64", "bf16" or "fp16", None for that of the parameters. Options:
        `max_shard_bytes`, of one file; `merge_adapters`, True to add LoRA adapters to the weights instead of writing
        them separately; `quantize`, True to write the weights of products as 8-bit numbers.

        Raises: ValueError for a model without a form in transformers, or a folder that is not empty.
        """
        export_model(self, self.form, path, ExportOptions(dtype, **options))

    def save_adapter(self, path: str | Path) -> None:
        """Write the adapters as a new folder in peft's format; all ranks call it. See `EngineOptions.adapter`.

        Raises: ValueError if there are none, or the folder is not empty; on all ranks alike.
        """
        self.check_call("save_adapter", path=(path, str | Path))
        save_adapter(self.pipeline, self.form, path)

    # ---- callbacks, the timeline, and the end

    def request_stop(self) -> None:
        """Ask all ranks to end after the next step, whose `TrainResult.stop_requested` is then true on all of them."""
        self.trainer.stop_requested = True

    def watch(self, *callbacks: Any) -> None:
        """Add callbacks on this rank for each step, evaluation and checkpoint, and the end.

        A callback is an object with any of the methods `on_step(result)`, `on_evaluation(step, loss)`,
        `on_checkpoint(step, path)` and `on_end(step)`, a class of such objects, or the name of either,
        ``package.module:object``. If one of the first two returns True, all ranks are asked to end, as by
        `Engine.request_stop`.

        Raises: ConfigError for an object without any of these methods.
        """
        self.callbacks.add(callbacks)

    def timeline(self) -> Timeline | None:
        """The measured timeline of the last step of pipeline 0, in ms, on rank 0; None elsewhere. All ranks call it.

        Ranks on one host share a clock; across hosts it is as exact as the hosts' clocks agree.
        """
        self.check_call("timeline")
        recording = self.pipeline.recording()
        return None if recording is None else recording.timeline

    def fixed_weights(self) -> AbstractContextManager[None]:
        """Within this context each weight is cast at most once, on first use (for autocast).

        `forward`, `evaluate` and `generate` each enter such a context; one of your own may span several calls. After a
        training step within it, the weights are cast again.
        """
        return self.pipeline.model.casts.kept()

    def close(self) -> None:
        """Stop helper threads; process groups belong to torch.distributed."""
        super().close()
        try:
            self.callbacks.call("on_end", self.step)
        finally:
            if "generator" in vars(self):
                self.generator.close()
            self.pipeline.close()

    def _slices(self) -> Slices:
        slices: dict[str, list[tuple[TensorSlice, Tensor]]] = {}
        for name, local in self.state(optimizer=False).items():
            # A tied copy counts under its original's name.
            if name not in self.pipeline.model.loans and (parts := local_slices(local)):
                slices.setdefault(self.ties.get(name, name), []).extend(parts.items())
        return slices

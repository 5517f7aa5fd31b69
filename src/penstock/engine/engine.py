"""The engine: one model over a grid of processes, which trains, scores and generates; each job has its own file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.build import units_of_layers
from penstock.engine.folders.export import ExportOptions, export_model
from penstock.engine.folders.lora import with_adapter
from penstock.engine.folders.model_folder import open_folder
from penstock.engine.folders.run_parts import read_arguments
from penstock.engine.generation.answers import GenerateOptions, GenerateResult
from penstock.engine.generation.generator import Generator
from penstock.engine.generation.requests import Interrupt, Listeners, OnAnswer, OnToken
from penstock.engine.model_state import ModelState
from penstock.engine.options import EngineOptions, changed
from penstock.engine.pipeline import Pipeline
from penstock.engine.sharding import UnitSource
from penstock.engine.training.losses import EvaluationLoss, LossFn, LossWeightFn, num_loss_tokens, token_cross_entropy
from penstock.engine.training.scorer import AggregateFn, Outputs, PostHook, Scorer
from penstock.engine.training.trainer import Trainer, TrainResult
from penstock.engine.weight_transfer import Port
from penstock.model.hf.config_json import HuggingFaceForm
from penstock.parallel import Grid
from penstock.runtime import Recorder
from penstock.settings import Layout, Native, Normalize, RunConfig, SamplingParams, checked

# ---- The engine's face for training: a batch in, one optimizer step


class BatchTraining(ModelState):
    """Trains the model by one batch after another."""

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str = Normalize.GLOBAL,
        step: int | None = None,
    ) -> TrainResult:
        """One optimizer step; every rank calls it. Parameters are trained if they require a gradient now.

        Args:
            batch: this pipeline's part of the data, a `PackedBatch`; ranks of one pipeline give the same, data-parallel
                ranks each their own.
            loss_fn: from the last stage's output (logits [T, V] of T tokens over V words) and the microbatch to the sum
                of its losses, one number with its graph; or that and a dict of numbers to report, each a `Metric`.
            loss_weight_fn: from a microbatch to its weight in the divisor of the loss.
            micro_batches: the parts that the batch is split into, a `MicroBatchSpec`; left out, one.
            normalize: the divisor of the loss, a `Normalize` or its name.
            step: the step's absolute number, on which rates depend; left out, one more than that of the last step.

        Raises:
            ZeroLossWeight: the weights of all microbatches are 0. Like the next two, on all ranks alike, before
                anything is computed.
            PipelineError: ranks of one pipeline were given different batches, or the engine is closed.
            ValueError: the batch cannot be split or computed so, or the engine was made with learns=False.
            StepError: on all ranks, when one has failed; the step has been undone, and the next one can be taken. (A
                rank that is alone raises the exception itself.)
            TransportError: a peer did not send or receive in time.
        """
        taken = self.trainer.train_batch(batch, loss_fn, loss_weight_fn, micro_batches, normalize, step)
        return self.stepped(taken)


# ---- The engine's face for scoring: batches in, their loss or what hooks make of the model's outputs


class BatchScoring(ModelState):
    """Scores batches with the weights as they are; nothing is learned."""

    #: runs forwards alone
    scorer: Scorer

    def evaluate(
        self,
        batches: Iterable[PackedBatch],
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
    ) -> EvaluationLoss:
        """The loss per unit of weight over all ranks' batches, the same on every rank; nothing is learned.

        The result is a float, whose `metrics` are the numbers that the loss function reported. The arguments are those
        of `Engine.train_batch`, with several batches. Ranks of one pipeline give the same ones; data-parallel ranks may
        have unequal numbers of them, except where they share experts (ep > 1).

        Raises: as `Engine.forward`.
        """
        return self.evaluated(self.scorer.evaluate(batches, loss_fn, loss_weight_fn, micro_batches))

    def forward(
        self,
        batch: PackedBatch,
        post_hook: PostHook | None = None,
        aggregate_fn: AggregateFn | None = None,
        micro_batches: MicroBatchSpec | None = None,
        output_seqlens: Sequence[int] | None = None,
        broadcast: bool = False,
    ) -> Any:
        """The model's outputs, or what hooks make of them, in the batch's order; every rank calls it.

        The rank of the last stage gets the result, the others None, unless `broadcast` is true.

        Args:
            batch: this pipeline's part of the data; ranks of one pipeline give the same.
            post_hook: called on the last stage with each microbatch's logits [T, V] and the microbatch; its result is
                kept, and the logits are freed unless it keeps them. None keeps all logits. Where ranks share sequences
                (cp), each of them gets whole logits, unless the hook is a `PerToken`.
            aggregate_fn: from one result per item, in the order of the batch (one per microbatch where they cannot be
                taken apart), to what is returned; None joins them.
            micro_batches: the parts that the batch is split into, a `MicroBatchSpec`; left out, one.
            output_seqlens: rows of each item in the results, where these are neither one per token, nor per sequence,
                nor per item.
            broadcast: True if all ranks of the pipeline get the result.

        Raises:
            PipelineError: ranks of one pipeline were given different batches. Like the next, on all ranks alike, before
                anything is computed.
            ValueError: the batch cannot be split or computed so. Also for results that do not fit its items, on the
                rank of the last stage, with a `PipelineError` on the others.
            StepError: on all ranks, when a hook or anything else has failed on one; the engine can be used further.
            TransportError: a peer did not send or receive in time.
        """
        return self.scorer.forward(batch, micro_batches, Outputs(post_hook, aggregate_fn, output_seqlens, broadcast))


# ---- The engine's face for generation: prompts in, answers out


class Generating:
    """Answers prompts with the weights as they are."""

    #: continues prompts
    generator: Generator

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

        Ranks of one pipeline give the same prompts and parameters, and all get the result.
        A token depends on the seed, its prompt, the number of its sample and its position, not on what else is
        generated nor on how. Where pipelines share experts (ep > 1) all of them call it together.

        Args:
            prompts: the token ids of each.
            params: `SamplingParams` for all prompts, or one for each; left out, the defaults.
            options: how to generate, as `GenerateOptions`.
            on_token: called with the answer's number in the result and each new token, on the rank of the first stage
                (like the next two; where there are several stages, in a thread beside the one that computes). If it
                returns true, that answer ends.
            on_answer: called with the answer's number and each answer as soon as it has ended.
            interrupt: asked between tokens; once it returns true, the call ends with the answers as they are, and
                `Engine.resume` can go on with them.

        Raises:
            ValueError: prompts or parameters are impossible; on all ranks alike, before anything is computed.
            PipelineError: ranks of one pipeline were given different ones.
            StepError: on all ranks, when one has failed, in a listener for example; generation is possible again.
            TransportError: a peer did not send or receive in time.
        """
        listeners = Listeners(on_token, on_answer, interrupt)
        return self.generator.generate(prompts, params, options or GenerateOptions(), listeners)

    def resume(self, keep_caches: bool = False) -> GenerateResult:
        """Go on with the call of `generate` that was interrupted last, with the weights as they are now.

        Prompts and tokens so far are read again with these weights, so the next tokens are those of a generation that
        begins there. `keep_caches` keeps what older weights made of them, and costs nothing. Random numbers, listeners
        and options go on in either case; each token bears the version of the weights it was drawn from.

        Raises: PipelineError if there is no such call, and all that `Engine.generate` raises.
        """
        return self.generator.resume(keep_caches)

    def release_caches(self) -> None:
        """Free the memory that generation keeps for its next call."""
        self.generator.release()


# ---- The engine: one model over a grid of processes, which trains, scores and generates; each job has its own file


class Engine(BatchTraining, BatchScoring, Generating):
    """One model over a grid of processes, which trains, scores and generates.

    Every process of the world constructs it at the same point, torch.distributed being initialised (one process needs
    none), and those of its layout call its methods in the same order. Several engines may live in one process. Most
    scripts make it by `Engine.from_layers`, `Engine.from_hf` or `Engine.from_config`, which find the units.

    Args:
        units: the model in order, as the smallest pieces that a stage is cut from: embedding, attention blocks, MLP
            blocks, final norm and head. Or a function that makes them from the process groups that share each of them
            (tensor, context and expert parallel); a layout that shares layers so (tp, cp or ep above 1) needs one.
        hidden_size: width of the residual stream [tokens, hidden_size] that stages pass on.
        layout: the grid of processes, a `Layout`; left out, one process.
        options: schedule, precision, optimizer and the rest, as `EngineOptions`.
        form: the model's names and configuration in transformers, for `Engine.save_hf`; None where it has none.
        **changes: any of the options by its name, in place of that in `options`.

    Raises:
        ConfigError: no option has such a name, options exclude each other, or ranks were given different ones.
        ValueError: the layout does not fit the world, or the model cannot be cut so.
        PipelineError: another rank could not build its part, and why.
        TransportError: a link between two ranks failed its test; the message names it.

    >>> engine = Engine.from_layers([torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32)], hidden_size=8)
    >>> batch = PackedBatch.from_documents([torch.arange(5), torch.arange(3)])
    >>> engine.train_batch(batch).num_tokens
    8
    """

    #: sizes of the grid's axes, and this rank's place and process groups in it
    layout: Layout
    grid: Grid
    #: records this rank's actions, and says where it is
    recorder: Recorder
    #: run forwards alone, and continue prompts
    scorer: Scorer
    generator: Generator
    #: sends weights to other engines
    port: Port

    @checked
    def __init__(
        self,
        units: UnitSource,
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        form: HuggingFaceForm | None = None,
        **changes: Any,
    ) -> None:
        self.layout, options = layout or Layout(), changed(options, changes)
        if (outside := Port.if_outside(self.layout, options)) is not None:
            self.port = outside
            return
        pipeline = Pipeline(with_adapter(units, options.adapter, form, self.layout), hidden_size, self.layout, options)
        super().__init__(pipeline, Trainer(pipeline), form)
        self.grid, self.recorder = pipeline.grid, pipeline.recorder
        self.scorer, self.generator = Scorer(pipeline), Generator(pipeline)

    @classmethod
    def from_config(cls, config: RunConfig | str | Path) -> Self:
        """The engine of a run's settings or their TOML file. Raises: ConfigError for mistakes; as `Engine.from_hf`."""
        return cls(*read_arguments(config))

    @classmethod
    def from_layers(
        cls,
        layers: Sequence[nn.Module],
        hidden_size: int,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        **changes: Any,
    ) -> Self:
        """An engine for a user's own layers, with the weights they have.

        The first layer takes the batch's `tokens`: ids [T], or anything else with T rows, such as images. One gives
        [T, hidden_size] to the next, and the last what the loss takes. Each is given what else its `forward` asks for
        by name: `sequences`, or any key of the batch. A parameter that several layers hold stays one: it is tied.

        Args:
            layers: the modules in order, or for each a `functools.partial` that makes it on the rank that holds it.
            hidden_size: width of what layers pass on. The other arguments are those of `Engine`.

        Raises: ValueError if there is no layer, or one is no module, or is given twice with buffers; and as `Engine`.
        """
        return cls(units_of_layers(layers), hidden_size, layout, options, **changes)

    @classmethod
    def from_hf(
        cls,
        path: str | Path,
        layout: Layout | None = None,
        options: EngineOptions | None = None,
        native: Native = True,
        **changes: Any,
    ) -> Self:
        """An engine for the model in a folder; all processes call it at the same point.

        Args:
            path: a folder of Hugging Face files, or that of a run, whose newest intact checkpoint is read.
            layout: the grid of processes, a `Layout`; left out, one process.
            options: `EngineOptions`; left out, the defaults in the precision of the files.
            native: True for Penstock's own layers, False for those of transformers (which cannot be shared over tp,
                cp or ep), "auto" for its own where it knows the family; of no effect for a run, which says it itself.
            **changes: any of the options by its name.

        Raises:
            FileNotFoundError: the folder or one of its files is missing; on every process if on one, as the next.
            ValueError: what cannot be run so, damaged files, wrong tensors, or pickles; and as `Engine`.
        """
        return cls(*open_folder(path, native).arguments_from_files(layout, options), **changes)

    def save_hf(self, path: str | Path, dtype: str | None = None, **options: Any) -> None:
        """Write the model as a new Hugging Face folder; all ranks call it.

        `path` is new or empty; `dtype` is "fp32", "fp64", "bf16" or "fp16", None for what the parameters have. Options:
        `max_shard_bytes`, of one file; `merge_adapters`, True to add LoRA adapters to the weights instead of writing
        them beside; `quantize`, True to keep the weights of products as 8-bit numbers.

        Raises: ValueError for a model that transformers has no form for, or a folder that holds something.
        """
        export_model(self, self.form, path, ExportOptions(dtype, **options))

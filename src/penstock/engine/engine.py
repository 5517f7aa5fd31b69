"""The engine: one model over a grid of processes, which trains, scores and generates; each job has its own file."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine.adapter import with_adapter
from penstock.engine.build import units_of_layers
from penstock.engine.export import ExportOptions, export_model
from penstock.engine.generating import Generating
from penstock.engine.generator import Generator
from penstock.engine.loss_metrics import EvaluationLoss
from penstock.engine.losses import LossFn, LossWeightFn, num_loss_tokens, token_cross_entropy
from penstock.engine.options import EngineOptions, changed
from penstock.engine.pipeline import Pipeline
from penstock.engine.pretrained import HuggingFaceForm, open_pretrained
from penstock.engine.run_parts import read_arguments
from penstock.engine.scorer import AggregateFn, Outputs, PostHook, Scorer
from penstock.engine.sending import Port
from penstock.engine.sharding import UnitSource
from penstock.engine.state import ModelState
from penstock.engine.trainer import Trainer, TrainResult
from penstock.parallel import Grid
from penstock.runtime import Recorder
from penstock.settings import Layout, Native, Normalize, RunConfig, checked


class Engine(ModelState, Generating):
    """Trains, scores and generates with a model given as a list of units (arguments and errors: see `Pipeline`).

    Every process of the world constructs it at the same point, torch.distributed being initialised (one process needs
    none), and those of its layout call its methods in the same order. Several engines may live in one process.

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
    #: runs forwards alone
    scorer: Scorer
    #: continues prompts
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
        """The engine of a run's settings, or of the TOML file that holds them. Raises: ValueError if they conflict."""
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
        """An engine for a user's own layers, with the weights they have; see `units_of_layers`."""
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
        """An engine for the model in a folder, in the files' precision by default; see `open_pretrained`."""
        return cls(*open_pretrained(path, native).arguments(layout, options), **changes)

    def save_hf(self, path: str | Path, dtype: str | None = None, **options: Any) -> None:
        """Write the model as a new Hugging Face folder; all ranks call it. See `export_model`, `ExportOptions`."""
        export_model(self, self.form, path, ExportOptions(dtype, **options))

    def train_batch(
        self,
        batch: PackedBatch,
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
        normalize: Normalize | str = Normalize.GLOBAL,
        step: int | None = None,
    ) -> TrainResult:
        """One optimizer step; see `Trainer.train_batch`. Ranks of one pipeline give the same batch."""
        taken = self.trainer.train_batch(batch, loss_fn, loss_weight_fn, micro_batches, normalize, step)
        return self.stepped(taken)

    def evaluate(
        self,
        batches: Iterable[PackedBatch],
        loss_fn: LossFn = token_cross_entropy,
        loss_weight_fn: LossWeightFn = num_loss_tokens,
        micro_batches: MicroBatchSpec | None = None,
    ) -> EvaluationLoss:
        """The loss per unit of weight over all ranks' batches, the same on every rank; nothing is learned."""
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
        """The model's outputs, or what hooks make of them, in the batch's order; see `Scorer.forward`, `Outputs`."""
        return self.scorer.forward(batch, micro_batches, Outputs(post_hook, aggregate_fn, output_seqlens, broadcast))

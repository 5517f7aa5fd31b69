"""The engine: one model over a grid of processes, which trains, scores and generates; each job has its own file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from torch import nn

from penstock.engine.adapter import with_adapter
from penstock.engine.build import units_of_layers
from penstock.engine.export import ExportOptions, export_model
from penstock.engine.generating import Generating
from penstock.engine.generator import Generator
from penstock.engine.options import EngineOptions, changed
from penstock.engine.pipeline import Pipeline
from penstock.engine.pretrained import HuggingFaceForm, open_pretrained
from penstock.engine.run_parts import read_arguments
from penstock.engine.scorer import Scorer
from penstock.engine.scoring import BatchScoring
from penstock.engine.sending import Port
from penstock.engine.sharding import UnitSource
from penstock.engine.trainer import Trainer
from penstock.engine.training import BatchTraining
from penstock.parallel import Grid
from penstock.runtime import Recorder
from penstock.settings import Layout, Native, RunConfig, checked


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
        return cls(*open_pretrained(path, native).arguments(layout, options), **changes)

    def save_hf(self, path: str | Path, dtype: str | None = None, **options: Any) -> None:
        """Write the model as a new Hugging Face folder; all ranks call it.

        `path` is new or empty; `dtype` is "fp32", "fp64", "bf16" or "fp16", None for what the parameters have. Options:
        `max_shard_bytes`, of one file; `merge_adapters`, True to add LoRA adapters to the weights instead of writing
        them beside; `quantize`, True to keep the weights of products as 8-bit numbers.

        Raises: ValueError for a model that transformers has no form for, or a folder that holds something.
        """
        export_model(self, self.form, path, ExportOptions(dtype, **options))

"""A saved model that `generate`, `score` and `serve` run: from a command's words and input to a loaded engine.

A command says what it reads and what it does with the engine. Its layout, its processes, their meeting, the cut, the
weights and the end are the same for all of them.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from penstock.cli.options import Options, Parser, add_options, options_of, values_of
from penstock.cli.output import ResultsFile, refuse_to_overwrite, show_log, waiting
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.meeting import Group, find_group_of
from penstock.settings import AXES, InferenceConfig, ModelConfig, ParallelConfig, RingConfig, TrainConfig, walk_settings

if TYPE_CHECKING:
    from penstock.cli.processes.session import Meeting, Pipelines
    from penstock.engine.engine import Engine
    from penstock.engine.folders.model_folder import ModelFolder
    from penstock.engine.options import EngineArguments

IMPORTS = (
    *("penstock.cli.processes.session", "penstock.data.examples"),
    *("penstock.engine.engine", "penstock.engine.generation.decode_cut", "penstock.engine.folders.model_folder"),
)
"""What each process of these commands needs, imported once for all."""

MODEL_OPTIONS: Options = {
    # What is left out is as in the model's files.
    own.key: replace(own, default=None) if own.key == "quantize" else own
    for own in (*walk_settings(ModelConfig()), *walk_settings(TrainConfig()), *walk_settings(InferenceConfig()))
    if own.name in ("model.native", "train.precision", "train.reproducible", "inference.quantize")
}
"""The options of a saved model that decide how it is run."""

RING_OPTIONS = options_of(RingConfig(), {"num_slots": "slots", "rows_per_slot": "rows"}, without=("max_rows_per_slot",))

_SLOWER = 1.05
"""What is slower by less than a measurement is off goes without a word."""


class ModelCommand:
    """One call of a command that runs a saved model, in the process that starts the others or in one of these.

    A class says what its command has of its own: its parser; `layout`, the options of the layout; `chosen`, those that
    it chooses by itself where none of them is given; `workers`, how its processes are started.
    """

    layout: ClassVar[Options]
    chosen: ClassVar[tuple[str, ...]] = ()
    #: tokens are read and none is written
    only_reads: ClassVar[bool] = False
    workers: WorkerCommand

    #: the command's words, and the values of its options
    words: Sequence[str]
    given: argparse.Namespace
    #: the file that it writes; None if there is none
    output: Path | None = None
    #: one pipeline, and how many of them share the work
    parallel: ParallelConfig
    dp: int
    #: further arguments of `open_model`, and the model once it has been read
    opened: dict[str, Any]
    model: "ModelFolder"
    #: while it works: this process's place, where it meets the others, and its pipeline among them
    group: Group
    meeting: "Meeting"
    pipelines: "Pipelines"

    @staticmethod
    def parser() -> Parser:
        raise NotImplementedError

    @classmethod
    def main(cls, words: Sequence[str]) -> int:
        """Run the command; returns its exit code.

        Raises:
            ValueError, OSError: the model, its input or the output cannot be used; nothing has been started or written.
        """
        command = cls(words)
        show_log("WARNING")
        if command.output is not None:
            refuse_to_overwrite(command.output, otherwise="give another --output")
        return command.run()

    def __init__(self, words: Sequence[str]) -> None:
        self.words, self.given = words, self.parser().parse_args(list(words))
        parallel = ParallelConfig(**values_of(self.given, self.layout))
        self.parallel, self.dp = replace(parallel, dp=1), parallel.dp
        self.opened = values_of(self.given, MODEL_OPTIONS) | ({"native": False} if self.given.no_native else {})

    @classmethod
    def add_options(cls, parser: Any, *more: Options, metavars: Mapping[str, str] | None = None) -> None:
        """Add the options of the layout, further ones, and those of the model to a parser or a group of it."""
        for options in (cls.layout, *more, MODEL_OPTIONS):
            add_options(parser, options, {"timeout": "SECONDS", **(metavars or {})}, cls.chosen)
        parser.add_argument("--no-native", action="store_true", help="as --native false")

    def look(self) -> "ModelFolder":
        """Open the model. Raises: ValueError for one that no number of processes could run."""
        return self.open_to_cut()

    def fit(self) -> list[str]:
        """The options of the layout that fits this machine, of a command that chooses one."""
        raise NotImplementedError

    def words_of_workers(self) -> Sequence[str]:
        """The words with which the command's processes are started."""
        return self.words

    def work(self) -> None:
        """Do what one process does."""
        raise NotImplementedError

    def run(self) -> int:
        """Run the command here, or start its workers on this machine; returns its exit code."""
        parallel = self.parallel
        sizes = {axis: self.dp if axis == "dp" else getattr(parallel, axis) for axis in self.layout if axis in AXES}
        group, world_size = find_group_of(sizes)
        if group is None and self.chosen and all(getattr(self.given, name) is None for name in self.chosen):
            return type(self)([*self.fit(), *self.words]).run()
        if group is None and world_size > 1:
            return launch(self.workers, self.words_of_workers(), world_size, parallel.num_threads, self.look)
        from penstock.cli.processes.session import Pipelines, work_together

        self.group = group or Group.alone()

        def work(meeting: "Meeting") -> None:
            self.meeting, self.pipelines = meeting, Pipelines.of(meeting.store, meeting.group, self.dp)
            self.work()

        return work_together(self.group, parallel.num_threads, parallel.timeout_s, work)

    def open_to_cut(self, **opened: Any) -> "ModelFolder":
        """Open the model; `opened` are further arguments of `open_model`.

        Raises: ValueError as `open_model` does, and for more stages than the model has units.
        """
        from penstock.engine.folders.model_folder import open_model

        model, pp = open_model(self.given.model, **self.opened, **opened), self.parallel.pp
        if pp > model.config.num_units:
            raise ValueError(
                f"--pp {pp} asks for {pp} stages, but {model.folder} has {model.config.num_units} units "
                f"to cut from, so at most {model.config.num_units} are possible"
            )
        return model

    @contextmanager
    def open(self, model: "ModelFolder", decoded: tuple[int, float] | None = None) -> "Iterator[tuple[Engine, str]]":
        """An engine with the model's weights, and their version; it is watched inside the block and closed after it.

        decoded: where the stages are cut for generation, the rows that a slot decodes and their mean number of tokens.
        """
        from penstock.cli.processes.session import initialise
        from penstock.engine.engine import Engine
        from penstock.engine.generation.decode_cut import cut_to_decode
        from penstock.runtime import Watchdog

        group = self.group
        if group.rank == 0:
            show_layers(model)
        parallel = self.meeting.choose_device(self.parallel)
        initialise(*self.pipelines.world(group), parallel)
        arguments = self._with_quantization(model, model.arguments(parallel))
        if decoded is not None:
            arguments = cut_to_decode(arguments, *decoded)
        engine = Engine(*arguments)
        with waiting(f"reading weights from {model.folder}", sys.stderr, speaks=group.rank == 0):
            version = model.load(engine)
        watchdog = Watchdog.of_run(engine.recorder, parallel.timeout_s, engine.grid.control, engine.grid.pp_ranks)
        try:
            yield engine, version
        finally:
            watchdog.close()
            engine.close()

    @contextmanager
    def results(self, decisive: Sequence[Any], numbers: Sequence[str], writes: bool) -> "Iterator[ResultsFile | None]":
        """The file of results in the process that writes it; None in the others, and where results are only shown.

        decisive, numbers: of `ResultsFile`; the model and how it computes decide, too.

        Raises: ValueError on every process, if the file cannot be written.
        """
        of_model = [str(self.model.folder.resolve()), self.opened["precision"], self.opened["reproducible"]]

        def opened() -> ResultsFile | None:
            return ResultsFile(self.output, [*of_model, *decisive], numbers) if writes and self.output else None

        with self.meeting.together("output", opened) or nullcontext() as file:
            yield file

    def _with_quantization(self, model: "ModelFolder", arguments: "EngineArguments") -> "EngineArguments":
        """The arguments without `auto` for quantized weights, as all processes choose; says where these are slower."""
        from penstock.engine.precision import parameter_dtype
        from penstock.model.cpu.quantized import measured_seconds, seconds_of_all, times_as_slow
        from penstock.settings import Quantize

        options, kind = arguments.options, model.kept_as
        if kind is Quantize.NONE or options.device != "cpu":
            return arguments
        dtype = parameter_dtype(options.precision)
        seconds = self.meeting.together("products", lambda: measured_seconds(dtype, kind))
        views = self.meeting.exchange("seconds of products", seconds)
        ratio = times_as_slow(kind, dtype, seconds_of_all(views), self.only_reads)
        if kind is Quantize.AUTO:
            model.quantize = kind = Quantize.INT8 if ratio < 1 else Quantize.NONE
            ratio = 1.0
        if self.group.rank == 0 and ratio > _SLOWER:
            print(
                f"penstock: {kind} is slower on this machine than {options.precision} without it: products take "
                f"{ratio:.2f} times as long; --quantize auto takes the faster one of int8 and none",
                file=sys.stderr,
            )
        return arguments._replace(options=replace(options, quantize=kind))


def show_layers(model: "ModelFolder") -> None:
    """Say on standard error where transformers' own layers run the model, and why."""
    if model.transformers_because is not None:
        print(f"penstock: transformers' own layers run {model.folder}: {model.transformers_because}", file=sys.stderr)

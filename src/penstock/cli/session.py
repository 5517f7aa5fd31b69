"""A session of a saved model, which `generate`, `score` and `serve` share: from a command's words to a loaded engine.

A command says what it reads and what it does with the engine. Its layout, its processes, their meeting, the cut, the
weights and the end are the same for all of them.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from penstock.cli.options import MODEL_OPTIONS, Options, options_of, values_of
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.layout_here import is_free, say_shared_cores
from penstock.cli.processes.meeting import Group, exchange, find_group_of
from penstock.settings import ParallelConfig, RingConfig

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from penstock.cli.processes.session import Pipelines
    from penstock.engine.engine import Engine
    from penstock.engine.folders.model_folder import ModelFolder

T = TypeVar("T")
A = TypeVar("A", bound="ModelArguments")

RING_OPTIONS = options_of(RingConfig(), {"num_slots": "slots", "rows_per_slot": "rows"}, without=("max_rows_per_slot",))


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """The arguments that these commands share; `axes` are those of a layout that the command takes.

    parallel: one pipeline, of which there are `dp`. layout_is_free: none was asked for, and the command chooses one.
    opened: further arguments of `open_model`.
    """

    axes: ClassVar[tuple[str, ...]]

    model: Path
    dp: int = 1
    parallel: ParallelConfig
    layout_is_free: bool = False
    opened: dict[str, Any]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each of the command's axes; their product is the number of processes."""
        return {axis: getattr(self if axis == "dp" else self.parallel, axis) for axis in self.axes}


def shared_arguments(given: argparse.Namespace, layout: Options, chosen: Sequence[str] = ()) -> dict[str, Any]:
    """The values of `ModelArguments` by name. chosen: options that the command chooses where none of them is given."""
    parallel = ParallelConfig(**values_of(given, layout))
    return {
        "model": given.model,
        "dp": parallel.dp,
        "parallel": replace(parallel, dp=1),
        "layout_is_free": bool(chosen) and is_free(given, chosen),
        "opened": values_of(given, MODEL_OPTIONS) | ({"native": False} if given.no_native else {}),
    }


class DecodedRows(NamedTuple):
    """The rows that a slot decodes, of so many tokens on average, and the tokens that all caches of a stage hold."""

    num_rows: int
    mean_tokens: float
    num_cached: int


@dataclass(eq=False)
class ModelSession(Generic[A]):
    """One process of a command that runs a saved model, and the store at which it meets the others."""

    #: the command's, its place among the processes, and where they meet
    arguments: A
    group: Group
    store: "Store"
    #: this process's pipeline among those that share the work
    pipelines: "Pipelines"

    def together(self, key: str, work: Callable[[], T]) -> T:
        """Do `work` on every process. Raises: ValueError on all of them where one refuses."""
        from penstock.cli.processes.session import together

        return together(self.store, self.group, key, work)

    def agree(self, key: str, ours: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange values among all processes; returns them by rank."""
        return exchange(self.store, self.group, key, ours)

    def refuse_differing(self, key: str, ours: Mapping[str, Any]) -> None:
        """Refuse values that differ between processes. Raises: ConfigError on all of them."""
        from penstock.cli.processes.session import refuse_differing

        refuse_differing(self.store, self.group, key, ours)

    @contextmanager
    def open(self, model: "ModelFolder", decoded: DecodedRows | None = None) -> "Iterator[tuple[Engine, str]]":
        """An engine with the model's weights, and their version; it is watched inside the block and closed after it.

        decoded: what the stages are cut for, if it is not what they would be cut for in training.
        """
        from penstock.cli.processes.measure import measured_ranks
        from penstock.cli.processes.session import choose_device, initialise
        from penstock.cli.progress import Waiting
        from penstock.cli.texts import show_layers
        from penstock.engine.engine import Engine
        from penstock.engine.generation.decode_cut import cut_to_decode
        from penstock.runtime import Watchdog

        store, group, parallel = self.store, self.group, self.arguments.parallel
        if group.rank == 0:
            show_layers(model)
        device = choose_device(store, group, parallel.device)
        initialise(*self.pipelines.world(group), device, parallel.timeout_s)
        arguments = model.arguments(replace(parallel, device=device))
        if decoded is not None:
            ranks = measured_ranks(store, group, parallel.pp, device)
            arguments = cut_to_decode(arguments, decoded.num_rows, decoded.mean_tokens, ranks, decoded.num_cached)
        engine = Engine(*arguments)
        with Waiting(f"reading weights from {model.folder}", sys.stderr, speaks=group.rank == 0):
            version = model.load(engine)
        watchdog = Watchdog.of_run(engine.recorder, parallel.timeout_s, engine.grid.control, engine.grid.pp_ranks)
        try:
            yield engine, version
        finally:
            watchdog.close()
            engine.close()


@dataclass(frozen=True)
class ModelCommand(Generic[A]):
    """The parts in which these commands differ.

    read: its arguments from its words. look: refuses what no number of processes could do, before any is started.
    work: that of one process. fit: the options of the layout that fits this machine. environ: for workers alone.
    """

    workers: WorkerCommand
    read: Callable[[Sequence[str]], A]
    look: Callable[[A], object]
    work: Callable[[ModelSession[A]], None]
    fit: Callable[[A], list[str]] | None = None
    environ: Callable[[A], AbstractContextManager[Mapping[str, str]]] = lambda _: nullcontext({})

    def run(self, words: Sequence[str], arguments: A) -> int:
        """Run the command here, or start its workers on this machine; returns its exit code."""
        group, world_size = find_group_of(arguments.sizes)
        if group is None and self.fit is not None and arguments.layout_is_free:
            words = [*self.fit(arguments), *words]
            arguments = self.read(words)
            group, world_size = find_group_of(arguments.sizes)
        parallel = arguments.parallel
        if group is None and world_size > 1:

            def look() -> None:
                self.look(arguments)
                # Not before, so that a refusal stays one sentence.
                say_shared_cores(world_size, parallel.device)

            with self.environ(arguments) as environ:
                return launch(self.workers, words, world_size, parallel.num_threads, environ, look)
        from penstock.cli.processes.session import Pipelines, work_together

        own = group or Group.alone()

        def work(store: "Store") -> None:
            pipelines = Pipelines.of(store, own, arguments.dp, parallel.timeout_s)
            self.work(ModelSession(arguments, own, store, pipelines))

        return work_together(own, parallel.num_threads, parallel.timeout_s, work)

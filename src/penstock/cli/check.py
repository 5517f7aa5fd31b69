"""`penstock check FILE`: the parts of a script or a run, in stages, held against a plain loop in one process."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.main import FAILED
from penstock.cli.options import Parser, add_json
from penstock.cli.output import print_json

if TYPE_CHECKING:
    from penstock.data import PackedBatch
    from penstock.engine.check import CheckReport


def parser() -> Parser:
    parser = Parser(
        "penstock check",
        """Before you train for a week: run a few steps of your own layers, loss and optimizer in pipeline stages, and
of a plain loop, both in this one process, and compare them bit for bit: outputs, losses, gradients, parameters,
buffers, extra state and random numbers; after a save and load, under activation checkpointing, and with another number
of microbatches. A difference is shown with its place and its usual causes, and the exit code is 1. A script runs up to
its first train_batch, whose batch and loss are taken; it needs no torchrun. Of a run's file the model is checked, cut
down to its first layers, on made-up tokens.""",
        examples=(
            ("penstock check train.py", "the layers that train.py gives to Engine.from_layers"),
            ("penstock check --pp 4 train.py --width 64", "in four stages, with an option of the script's own"),
            ("penstock check --json run.toml", "the model of a run, as one JSON document"),
        ),
    )
    parser.add_argument("file", metavar="FILE", type=Path, help="a script (.py), or the settings of a run (.toml)")
    words = parser.add_argument("words", metavar="ARGUMENT", nargs=argparse.REMAINDER, help="all else is the script's")
    words.required = False  # none is as good; argparse would ask for one
    parser.add_argument("--pp", type=int, default=2, metavar="STAGES", help="pipeline stages (default 2)")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="training steps (default 2)")
    parser.add_argument("--layers", type=int, default=2, metavar="N", help="layers that are left of a run (default 2)")
    add_json(parser)
    return parser


def main(words: list[str]) -> int:
    """Check a file, and print the report; returns 0 where nothing differs, else 1."""
    given = parser().parse_args(words)
    if not given.file.is_file():
        number = errno.EISDIR if given.file.is_dir() else errno.ENOENT
        raise OSError(number, os.strerror(number), str(given.file))
    if given.file.suffix not in (".py", ".toml"):
        raise ValueError(f"{given.file} is neither a script (.py) nor the settings of a run (.toml)")
    # What a script prints goes beside the report.
    with contextlib.redirect_stdout(sys.stderr):
        report = _of_script(given) if given.file.suffix == ".py" else _of_run(given)
    if given.json:
        print_json(_to_json(report))
    else:
        print(report)
    return 0 if report.is_equal else 1


def _to_json(report: CheckReport) -> Mapping[str, Any]:
    differences = [
        {
            **{name: getattr(difference, name) for name in ("step", "microbatch", "what", "values")},
            "way": difference.way.name.lower(),
            "causes": [{"name": cause.name.lower(), "text": cause.text} for cause in difference.causes],
        }
        for difference in report.differences
    ]
    return {"is_equal": report.is_equal, "compared": report.compared, "differences": differences}


def _of_run(given: Any) -> CheckReport:
    from penstock.engine.check.comparison import compare_run
    from penstock.settings import read_config

    if given.words:
        raise ValueError(f"{given.words[0]!r} stands behind {given.file}; options of penstock check stand before it")
    return compare_run(read_config(given.file), given.pp, given.steps, given.layers)


# ---- A script, up to its first step


class _Reached(BaseException):
    """A script has come to its first step; no script catches it by `except Exception`."""

    #: the engine, and the arguments of its `train_batch`
    engine: Any
    arguments: Mapping[str, Any]

    def __init__(self, engine: Any, arguments: Mapping[str, Any]) -> None:
        self.engine, self.arguments = engine, arguments


def _of_script(given: Any) -> CheckReport:
    from penstock.data import PackedBatch
    from penstock.engine.check.comparison import compare_parts
    from penstock.engine.check.own_parts import OwnParts
    from penstock.engine.training.loss import num_loss_tokens, token_cross_entropy
    from penstock.settings import Layout

    layers, reached = _first_step(given.file, given.words)
    found = dict(reached.arguments)
    batch = found.pop("batch")
    if isinstance(batch, list | tuple):
        batch = _in_one(batch, given.file)
    if not isinstance(batch, PackedBatch):
        raise ValueError(f"{given.file} trains on an iterator of microbatches; a check needs a PackedBatch, or a list")
    loss_fn, weight_fn = found.get("loss_fn", token_cross_entropy), found.get("loss_weight_fn", num_loss_tokens)
    parts = OwnParts(layers, loss_fn, weight_fn, reached.engine.pipeline.options)
    return compare_parts(parts, batch, Layout(pp=given.pp), given.steps)


def _in_one(microbatches: Sequence[PackedBatch], script: Path) -> PackedBatch:
    """A script's own microbatches as one batch. Raises: ValueError where there is none."""
    from penstock.data import PackedBatch

    if not microbatches:
        raise ValueError(f"{script} trains on an empty list; a check needs a PackedBatch, or a list of them")
    counts = itertools.count()
    # Two may have the same ids, as those of `from_documents` have.
    numbered = [replace(own, ids=tuple(itertools.islice(counts, len(own.ids)))) for own in microbatches]
    return PackedBatch.gather(numbered)


def _first_step(script: Path, words: list[str]) -> tuple[Any, _Reached]:
    """The layers that a script gives to `Engine.from_layers`, and its first call of `train_batch`.

    Raises: ValueError where it makes no such engine, or takes no step; SystemExit after an error of its own.
    """
    try:
        with _recorded() as layers, _as_main(script, words):
            runpy.run_path(str(script), run_name="__main__")
    except _Reached as reached:
        if id(reached.engine) not in layers:
            raise ValueError(
                f"{script} trains no layers of its own, such as Engine.from_layers takes; a check is of those, or of a "
                "run's file"
            ) from None
        return layers[id(reached.engine)], reached
    except Exception as error:
        # As Python shows it, from the script's own line on.
        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != str(script):
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        raise SystemExit(FAILED) from None
    raise ValueError(f"{script} ended without a call of train_batch, so there is no step to check")


@contextlib.contextmanager
def _recorded() -> Iterator[dict[int, Any]]:
    """Within this context engines lie in one process, their first step is reported, and their layers are kept."""
    import copy

    from penstock.engine.engine import Engine
    from penstock.settings import Layout

    layers_of: dict[int, Any] = {}
    make, step = Engine.from_layers.__func__, Engine.train_batch

    def from_layers(cls: Any, layers: Any, hidden_size: int, layout: Any = None, *others: Any, **changes: Any) -> Any:
        # An engine changes what it is given; the loss may reach the layers themselves.
        engine = make(cls, copy.deepcopy(layers), hidden_size, Layout(), *others, **changes)
        layers_of[id(engine)] = layers
        return engine

    def train_batch(self: Any, batch: Any, *others: Any, **named: Any) -> Any:
        names = ("loss_fn", "loss_weight_fn", "micro_batches", "normalize", "step")
        raise _Reached(self, {"batch": batch, **dict(zip(names, others, strict=False)), **named})

    Engine.from_layers, Engine.train_batch = classmethod(from_layers), train_batch  # type: ignore[assignment]
    try:
        yield layers_of
    finally:
        Engine.from_layers, Engine.train_batch = classmethod(make), step  # type: ignore[assignment]


@contextlib.contextmanager
def _as_main(script: Path, words: list[str]) -> Iterator[None]:
    """Within this context the process is as a script started by torchrun finds it, the only one of its world."""
    argv, path, environ = sys.argv, list(sys.path), dict(os.environ)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environ)

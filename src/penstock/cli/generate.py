"""`penstock generate MODEL [PROMPT ...]`: continues prompts with a saved model."""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.commands import Parser, refuse_to_overwrite
from penstock.cli.group import Group, find_group_of
from penstock.cli.launch import WorkerCommand, launch
from penstock.cli.setting_options import PROCESSES, add_options, options_of, parallel_options, values_of
from penstock.settings import ParallelConfig, RingConfig, SamplingParams, walk

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from penstock.cli.generate_output import AnswersFile, GenerateJob

STANDARD_INPUT = "PENSTOCK_STANDARD_INPUT"
"""The environment variable that names, for workers, the file with the command's standard input."""

_IMPORTS = ("penstock.cli.generate_output", "penstock.cli.together", "penstock.engine.engine")

# Options that are settings of `SamplingParams`: the option's name where it is another, and the metavar of its value.
_SAMPLING = {
    "max_new_tokens": ("max_new_tokens", "N"),
    "min_new_tokens": ("min_new_tokens", "N"),
    "temperature": ("temperature", "T"),
    "top_k": ("top_k", "K"),
    "top_p": ("top_p", "P"),
    "chained": ("chained", None),
    "seed": ("seed", "N"),
    "num_samples": ("samples", "N"),
    "raw_log_probs": ("raw_log_probs", None),
}
_PARALLEL = parallel_options(("pp", "tp", *PROCESSES))
_RING = options_of(RingConfig(), {"num_slots": "slots", "rows_per_slot": "rows"}, without=("max_rows_per_slot",))


@dataclass(frozen=True)
class GenerateArguments:
    """One call of the command.

    prompts: from the command line; file: JSON lines; with neither, the prompt is standard input. sampling: settings of
    `SamplingParams` by name, except the end tokens. ring: those of `RingConfig`. end_tokens: None for
    those of the model.
    """

    model: Path
    prompts: tuple[str, ...]
    file: Path | None
    output: Path | None
    fresh: bool
    sampling: dict[str, Any]
    end_tokens: tuple[int, ...] | None
    stop: tuple[str, ...]
    ring: dict[str, Any]
    parallel: ParallelConfig
    json: bool


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError, OSError: the model, the prompts or the output cannot be used; nothing has been started or written.
    """
    arguments = read_arguments(words)
    if arguments.output is not None:
        refuse_to_overwrite(arguments.output, otherwise="give another --output")
    group, world_size = find_group_of({"pp": arguments.parallel.pp, "tp": arguments.parallel.tp})
    if group is None and world_size > 1:
        return _launch(words, arguments)
    return _run_worker(arguments, group or Group.alone())


def _launch(words: Sequence[str], arguments: GenerateArguments) -> int:
    """Start the workers, with standard input in a file where it is the prompt: it can be read only once."""
    parallel = arguments.parallel
    again = "gives the same answers" if arguments.output is None else "continues where it was stopped"
    command = WorkerCommand("penstock.cli.generate", again, _IMPORTS)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        environ = {}
        if not arguments.prompts and arguments.file is None:
            given = Path(folder) / "prompt.txt"
            given.write_text(_standard_input(), encoding="utf-8")
            environ[STANDARD_INPUT] = str(given)
        return launch(
            command, words, parallel.world_size, parallel.num_threads, environ, check=lambda: _check_model(arguments)
        )


def _check_model(arguments: GenerateArguments) -> None:
    """Refuse what no number of processes could do; the prompts are left to them."""
    from penstock.cli.texts import open_to_cut

    open_to_cut(arguments.model, arguments.parallel.pp)


def _parser() -> Parser:
    parser = Parser(
        "penstock generate",
        """Continue prompts with the model in a folder: that of a run, whose newest checkpoint is taken, or of a Hugging
Face model. Prompts are given on the command line, or as JSON lines ({"prompt": ...} or {"tokens": [...]}, with an "id"
that is carried along), or one comes from standard input. Answers to a file are kept as soon as they have ended: a
stopped call continues when it is given again. A token depends on the seed, its prompt and its place alone:
not on the other prompts, nor on --pp, --slots and --rows.""",
        examples=(
            'penstock generate runs/demo "def main("                  print the answer as it comes',
            "penstock generate runs/demo --file prompts.jsonl         write prompts.answers.jsonl, or go on with it",
            'penstock generate model/ "Once" --samples 4 --json       tokens, texts and log-probabilities as JSON',
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to continue")
    parser.add_argument("--file", type=Path, metavar="FILE.jsonl", help="prompts, a JSON object a line")
    parser.add_argument("--output", type=Path, metavar="OUT.jsonl", help="default with --file: FILE.answers.jsonl")
    parser.add_argument("--fresh", action="store_true", help="drop the answers that a stopped call has left")
    sampling = parser.add_argument_group("sampling")
    for own in walk(SamplingParams()):
        if own.key in _SAMPLING:
            name, metavar = _SAMPLING[own.key]
            option = f"--{name.replace('_', '-')}"
            if isinstance(own.default, bool):
                sampling.add_argument(option, action="store_true", help=own.help)
            else:
                kind = float if isinstance(own.default, float) else int
                sampling.add_argument(option, type=kind, default=own.default, metavar=metavar, help=own.help)
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer that contains it")
    sampling.add_argument("--end-token", type=int, action="append", metavar="ID", help="default: the model's own")
    sampling.add_argument("--ignore-end", action="store_true", help="no end token but those given ends an answer")
    ring = parser.add_argument_group("how it runs")
    for options in (_PARALLEL, _RING):
        add_options(ring, options, {"timeout": "SECONDS"})
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and progress to standard error")
    return parser


def read_arguments(words: Sequence[str]) -> GenerateArguments:
    """Read the command line.

    Raises: ValueError for a mistake in it.
    """
    given = _parser().parse_args(list(words))
    if given.file is not None and given.prompts:
        raise ValueError(f"prompts are given twice: {given.prompts[0]!r} and --file {given.file}; give one of them")
    if given.output is not None and given.file is None:
        raise ValueError("--output is where the answers to --file go; give --file, or leave it out")
    if given.fresh and given.file is None:
        raise ValueError("--fresh drops answers to --file that a stopped call has left; give --file, or leave it out")
    if "" in given.stop:
        raise ValueError("--stop is an empty text, which every answer holds; give some characters")
    return GenerateArguments(
        model=given.model,
        prompts=tuple(given.prompts),
        file=given.file,
        output=given.output or (given.file and given.file.with_suffix(".answers.jsonl")),
        fresh=given.fresh,
        sampling={key: getattr(given, name) for key, (name, _) in _SAMPLING.items()},
        end_tokens=tuple(given.end_token or ()) if given.ignore_end or given.end_token else None,
        stop=tuple(given.stop),
        ring=values_of(given, _RING),
        parallel=ParallelConfig(**values_of(given, _PARALLEL)),
        json=given.json,
    )


def check(arguments: GenerateArguments) -> "GenerateJob":
    """Read the model's settings and the prompts.

    Raises: ValueError for prompts that the model cannot continue.
    """
    from penstock.cli.generate_output import GenerateJob
    from penstock.cli.texts import open_to_cut, prompts_of_texts, read_prompts
    from penstock.engine.generator import GenerateOptions, check_prompts
    from penstock.model import Limits

    model = open_to_cut(arguments.model, arguments.parallel.pp)
    if arguments.stop and model.tokenizer is None:
        raise ValueError(f"--stop is a text, but {model.folder} has no tokenizer; give --end-token ids")
    ends = model.end_tokens if arguments.end_tokens is None else arguments.end_tokens
    params = SamplingParams(**arguments.sampling, end_tokens=ends)
    if arguments.file is not None:
        prompts = read_prompts(arguments.file, model)
    else:
        prompts = prompts_of_texts(arguments.prompts or [_standard_input()], model)
    limits = Limits(model.vocab_size, model.max_length)
    check_prompts([prompt.tokens for prompt in prompts], [params] * len(prompts), limits)
    options = GenerateOptions(**arguments.ring)
    return GenerateJob(model, prompts, params, options, arguments.stop, arguments.output, arguments.json)


def _standard_input() -> str:
    path = os.environ.get(STANDARD_INPUT)
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    if sys.stdin.isatty():
        print("penstock: type the prompt, and Ctrl-D to end it", file=sys.stderr)
    return sys.stdin.read()


def _answers_file(job: "GenerateJob", version: str, fresh: bool) -> "AnswersFile | None":
    """Open the file of answers, with those that a stopped call left there.

    Raises: ValueError if the file cannot be written, or its answers belong to other input.
    """
    from penstock.cli.generate_output import AnswersFile

    if job.output is None:
        return None
    given = [[list(prompt.tokens), prompt.line, prompt.id] for prompt in job.prompts]
    decisive = [str(job.model.folder.resolve()), version, given, asdict(job.params), job.stop]
    digest = hashlib.blake2b(json.dumps(decisive).encode(), digest_size=8).hexdigest()
    return AnswersFile(job.output, digest, job.params.num_samples, fresh)


def _run_worker(arguments: GenerateArguments, group: Group) -> int:
    """Generate as one process of `group`; returns the exit code."""
    from penstock.cli.together import work_together

    parallel = arguments.parallel
    return work_together(
        group, parallel.num_threads, parallel.timeout_s, lambda store: _generate(arguments, group, store)
    )


def _generate(arguments: GenerateArguments, group: Group, store: "Store") -> None:
    from penstock.cli.generate_output import AnswerReporter
    from penstock.cli.together import choose_device, initialise, refuse_differing, together
    from penstock.engine.engine import Engine
    from penstock.parallel.host import broadcast_value
    from penstock.runtime import Watchdog

    parallel = arguments.parallel
    job = together(store, group, "prompts", lambda: check(arguments))
    refuse_differing(store, group, "answers", {**arguments.sampling, "prompts": [list(p.tokens) for p in job.prompts]})
    device = choose_device(store, group, parallel.device)
    initialise(store, group, device, parallel.timeout_s)
    engine = Engine(*job.model.arguments(replace(parallel, device=device)))
    version = job.model.load(engine)
    file = together(
        store, group, "output", lambda: _answers_file(job, version, arguments.fresh) if group.rank == 0 else None
    )
    kept: list[int] = broadcast_value(file and file.kept, 0, engine.grid.control) or []
    reporter = None
    if engine.pipeline.holds_first_stage:
        # All ranks that share the first stage receive every token, since tokens decide when an answer ends; one prints.
        reporter = AnswerReporter(job, file, silent=engine.grid.tp_rank > 0)
    watchdog = Watchdog.of_run(engine.recorder, parallel.timeout_s, engine.grid.control, engine.grid.pp_ranks)
    try:
        prompts = [prompt.tokens for prompt in job.prompts]
        options = replace(job.options, skip=frozenset(kept))
        result = engine.generate(
            prompts,
            job.params,
            options,
            reporter and reporter.hear,
            reporter.take if reporter is not None and file else None,
        )
    except BaseException:
        if file is not None:
            file.close()
        raise
    finally:
        if reporter is not None:
            reporter.close()
        watchdog.close()
        engine.close()
    if reporter is not None:
        reporter.end(result)

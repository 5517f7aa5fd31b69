"""`penstock generate MODEL [PROMPT ...]`: continues prompts with a saved model."""

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.commands import Parser, refuse_to_overwrite
from penstock.cli.options import MODEL_OPTIONS, PROCESSES, add_options, parallel_options, values_of
from penstock.cli.processes.launch import WorkerCommand
from penstock.cli.processes.memory_limits import check_rows
from penstock.cli.progress import show_log
from penstock.cli.session import (
    RING_OPTIONS,
    DecodedRows,
    ModelArguments,
    ModelCommand,
    ModelSession,
    shared_arguments,
)
from penstock.settings import SamplingParams, Setting, walk_settings

if TYPE_CHECKING:
    from penstock.cli.answers_file import AnswersFile, GenerateJob
    from penstock.engine.folders.model_folder import ModelFolder

STANDARD_INPUT = "PENSTOCK_STANDARD_INPUT"
"""The environment variable that names, for workers, the file with the command's standard input."""

_IMPORTS = ("penstock.cli.answers_file", "penstock.cli.processes.session", "penstock.engine.engine")

# Options that are settings of `SamplingParams`: the option's name where it is another, and the metavar of its value.
_SAMPLING = {
    "max_new_tokens": ("max_new_tokens", "N"),
    "min_new_tokens": ("min_new_tokens", "N"),
    "temperature": ("temperature", "T"),
    "top_k": ("top_k", "K"),
    "top_p": ("top_p", "P"),
    "chained": ("chained", None),
    "min_p": ("min_p", "P"),
    "repetition_penalty": ("repetition_penalty", "X"),
    "presence_penalty": ("presence_penalty", "X"),
    "frequency_penalty": ("frequency_penalty", "X"),
    "stop": ("stop", "TEXT"),
    "seed": ("seed", "N"),
    "num_samples": ("samples", "N"),
    "raw_log_probs": ("raw_log_probs", None),
    "top_log_probs": ("top_log_probs", "N"),
}
_PARALLEL = parallel_options(("pp", "dp", "tp", *PROCESSES))
_CHOSEN = ("pp", "dp", "tp", "threads")


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(ModelArguments):
    """One call of the command; the pipelines share the prompts.

    prompts: from the command line; file: JSON lines; with neither, the prompt is standard input. sampling: settings of
    `SamplingParams` by name, those that were given. bad_words: texts. ring: settings of `RingConfig`. end_tokens: None
    for those of the model.
    """

    axes = ("pp", "dp", "tp")

    prompts: tuple[str, ...]
    file: Path | None
    output: Path | None
    fresh: bool
    sampling: dict[str, Any]
    end_tokens: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    ring: dict[str, Any]
    special_tokens: bool
    json: bool


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError, OSError: the model, the prompts or the output cannot be used; nothing has been started or written.
    """
    arguments = read_arguments(words)
    show_log("WARNING")
    if arguments.output is not None:
        refuse_to_overwrite(arguments.output, otherwise="give another --output")
    again = "gives the same answers" if arguments.output is None else "continues where it was stopped"
    workers = WorkerCommand("penstock.cli.generate", again, _IMPORTS)
    command = ModelCommand(workers, read_arguments, _open, _generate, _fitting_options, _workers_environ)
    return command.run(words, arguments)


@contextlib.contextmanager
def _workers_environ(arguments: GenerateArguments) -> Iterator[dict[str, str]]:
    """Put standard input into a file where it is the prompt: it can be read only once."""
    if arguments.prompts or arguments.file is not None:
        yield {}
        return
    with _file_with(_standard_input()) as path:
        yield {STANDARD_INPUT: path}


@contextlib.contextmanager
def _file_with(text: str) -> Iterator[str]:
    """The path of a file with this text; on Linux it has no name, so that nothing is left however this process ends."""
    is_nameless = sys.platform == "linux"
    make = tempfile.TemporaryFile if is_nameless else tempfile.NamedTemporaryFile
    with make("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if is_nameless else file.name


def _fitting_options(arguments: GenerateArguments) -> list[str]:
    """The options of the layout in which this machine is expected to end first.

    Raises: ValueError for a model that cannot be run here.
    """
    from penstock.cli.processes.layout_here import options_here

    model, file = _open(arguments), arguments.file
    num_prompts = len(arguments.prompts) or 1
    if file is not None and file.is_file():
        with file.open("rb") as lines:
            num_prompts = max(1, sum(1 for _ in lines))
    asked = {**model.sampling, **arguments.sampling}
    params = SamplingParams(**{key: asked[key] for key in ("num_samples", "max_new_tokens") if key in asked})
    num_answers = num_prompts * params.num_samples
    return options_here(model, num_answers, params.max_new_tokens, num_answers, arguments.parallel.device)


def _open(arguments: GenerateArguments) -> "ModelFolder":
    """Open the model. Raises: ValueError for one that no number of processes could run; prompts are left to them."""
    from penstock.cli.texts import open_to_cut

    return open_to_cut(arguments.model, arguments.parallel.pp, **arguments.opened)


def parser() -> Parser:
    """The parser of `penstock generate`."""
    parser = Parser(
        "penstock generate",
        """Continue prompts with the model in a folder: that of a run, whose newest checkpoint is taken, or of a Hugging
Face model. Prompts are given on the command line, or as JSON lines ({"prompt": ...} or {"tokens": [...]}, with an "id"
that is carried along), or one comes from standard input. Answers to a file are kept as soon as they have ended: a
stopped call continues when it is given again. A token depends on the seed, its prompt and its place alone:
not on the other prompts, nor on --pp, --dp, --slots and --rows.""",
        examples=(
            ('penstock generate runs/demo "def main("', "print the answer as it comes"),
            ("penstock generate runs/demo --file prompts.jsonl", "write prompts.answers.jsonl, or go on with it"),
            ('penstock generate model/ "Once" --samples 4 --json', "tokens, texts and log-probabilities as JSON"),
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to continue")
    parser.add_argument("--file", type=Path, metavar="FILE.jsonl", help="prompts, a JSON object a line")
    parser.add_argument("--output", type=Path, metavar="OUT.jsonl", help="default with --file: FILE.answers.jsonl")
    parser.add_argument("--fresh", action="store_true", help="drop the answers that a stopped call has left")
    sampling = parser.add_argument_group("sampling (what is not given, as the model's generation_config.json says)")
    for own in walk_settings(SamplingParams()):
        if own.key in _SAMPLING:
            _add_sampling(sampling, own)
    sampling.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="added to the logit of the token with that id"
    )
    sampling.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="a text whose tokens no answer completes"
    )
    sampling.add_argument("--end-token", type=int, action="append", metavar="ID", help="default: the model's own")
    sampling.add_argument("--ignore-end", action="store_true", help="no end token but those given ends an answer")
    ring = parser.add_argument_group("how it runs (where no layout is given, as fits this machine)")
    for options in (_PARALLEL, RING_OPTIONS, MODEL_OPTIONS):
        add_options(ring, options, {"timeout": "SECONDS"}, _CHOSEN)
    parser.add_argument("--no-native", action="store_true", help="as --native false")
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="texts without the tokenizer's own, such as one to begin with"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and progress to standard error")
    return parser


def _add_sampling(parser: Any, own: Setting) -> None:
    """Add the option of a sampling setting; one that is not given is None."""
    name, metavar = _SAMPLING[own.key]
    option, text = f"--{name.replace('_', '-')}", own.help.rstrip(".")
    if isinstance(own.default, bool):
        parser.add_argument(option, action=BooleanOptionalAction, default=None, help=text)
    elif isinstance(own.default, tuple):
        parser.add_argument(option, action="append", metavar=metavar, help=text)
    else:
        kind = float if isinstance(own.default, float) else int
        default = "" if own.default is None else f" (default {own.default})"
        parser.add_argument(option, type=kind, metavar=metavar, help=text + default)


def _bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ArgumentTypeError(f"{word!r} is no bias; give a token id and a number, such as 17=-2.5") from None


def read_arguments(words: Sequence[str]) -> GenerateArguments:
    """Read the command line.

    Raises: ValueError for a mistake in it.
    """
    given = parser().parse_args(list(words))
    if given.file is not None and given.prompts:
        raise ValueError(f"prompts are given twice: {given.prompts[0]!r} and --file {given.file}; give one of them")
    if given.output is not None and given.file is None:
        raise ValueError("--output is where the answers to --file go; give --file, or leave it out")
    if given.fresh and given.file is None:
        raise ValueError("--fresh drops answers to --file that a stopped call has left; give --file, or leave it out")
    sampling = {key: getattr(given, name) for key, (name, _) in _SAMPLING.items()}
    sampling["logit_bias"] = given.logit_bias and dict(given.logit_bias)
    return GenerateArguments(
        **shared_arguments(given, _PARALLEL, _CHOSEN),
        prompts=tuple(given.prompts),
        file=given.file,
        output=given.output or (given.file and given.file.with_suffix(".answers.jsonl")),
        fresh=given.fresh,
        sampling={key: value for key, value in sampling.items() if value is not None},
        end_tokens=tuple(given.end_token or ()) if given.ignore_end or given.end_token else None,
        bad_words=tuple(given.bad_word),
        ring=values_of(given, RING_OPTIONS),
        special_tokens=not given.no_special_tokens,
        json=given.json,
    )


def check_requests(arguments: GenerateArguments) -> "GenerateJob":
    """Read the model's settings and the prompts.

    Raises: ValueError for prompts that the model cannot continue.
    """
    from penstock.cli.answers_file import GenerateJob
    from penstock.cli.texts import plainly, prompts_of_texts, read_prompts, tokens_of_word
    from penstock.engine.generation.answers import GenerateOptions, check_prompts
    from penstock.model import Limits

    model = _open(arguments)
    model = model if arguments.special_tokens else plainly(model)
    if arguments.sampling.get("stop") and model.tokenizer is None:
        raise ValueError(f"--stop is a text, but {model.folder} has no tokenizer; give --end-token ids")
    ends = model.end_tokens if arguments.end_tokens is None else arguments.end_tokens
    words = [tokens for word in arguments.bad_words for tokens in tokens_of_word(word, model)]
    words += map(tuple, model.sampling.get("bad_words", ()))
    given = {**model.sampling, **arguments.sampling, "end_tokens": ends, "bad_words": tuple(words)}
    params = SamplingParams(**given)
    if arguments.file is not None:
        prompts = read_prompts(arguments.file, model)
    else:
        prompts = prompts_of_texts(arguments.prompts or [_standard_input()], model)
    limits = Limits(model.vocab_size, model.max_length)
    names = [prompt.name(number, arguments.file) for number, prompt in enumerate(prompts)]
    check_prompts([prompt.tokens for prompt in prompts], [params] * len(prompts), limits, names)
    options = GenerateOptions(**arguments.ring, tokenizer=model.tokenizer)
    shape = options.shape(len(prompts) * params.num_samples, arguments.parallel.pp)
    longest = max(len(prompt.tokens) for prompt in prompts) + params.max_new_tokens
    check_rows(shape.num_slots, shape.num_rows, longest, model.num_units, arguments.parallel.device)
    return GenerateJob(model, prompts, params, options, arguments.output, arguments.json)


def _standard_input() -> str:
    path = os.environ.get(STANDARD_INPUT)
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    if sys.stdin.isatty():
        print("penstock: type the prompt, and Ctrl-D to end it", file=sys.stderr)
    return sys.stdin.read()


def _answers_file(job: "GenerateJob", version: str, numbers: dict[str, Any], fresh: bool) -> "AnswersFile | None":
    """Open the file of answers, with those that a stopped call left there.

    Raises: ValueError if the file cannot be written, or its answers belong to other input.
    """
    from penstock.cli.answers_file import AnswersFile

    if job.output is None:
        return None
    given = [[list(prompt.tokens), prompt.line, prompt.id] for prompt in job.prompts]
    decisive = [str(job.model.folder.resolve()), version, given, asdict(job.params), numbers]
    digest = hashlib.blake2b(json.dumps(decisive).encode(), digest_size=8).hexdigest()
    return AnswersFile(job.output, digest, job.params.num_samples, fresh)


def _generate(session: ModelSession[GenerateArguments]) -> None:
    from penstock.cli.answers_file import AnswerCollector, AnswerSender, others_answers
    from penstock.cli.texts import show_lacking

    arguments, pipelines, is_first = session.arguments, session.pipelines, session.group.rank == 0
    job = session.together("prompts", lambda: check_requests(arguments))
    prompts = [prompt.tokens for prompt in job.prompts]
    if is_first:
        show_lacking(job.model, arguments.sampling)
    session.refuse_differing("answers", {**arguments.sampling, "prompts": [list(prompt) for prompt in prompts]})
    numbers = {name: arguments.opened[name] for name in ("precision", "reproducible")}
    with session.open(job.model, _decoded(job, arguments.parallel.pp)) as (engine, version):
        file = session.together(
            "output", lambda: _answers_file(job, version, numbers, arguments.fresh) if is_first else None
        )
        kept = frozenset(session.agree("kept", {"kept": file.kept if file else []})[0]["kept"])
        listener = None
        if engine.pipeline.holds_first_stage and engine.grid.tp_rank == 0:
            listener = AnswerCollector(job, file, pipelines) if pipelines.index == 0 else AnswerSender(pipelines)
        try:
            options = replace(job.options, skip=kept | others_answers(job, pipelines))
            result = engine.generate(
                prompts, job.params, options, listener and listener.on_token, listener and listener.on_answer
            )
            if listener is not None:
                listener.end(result)
            # The store may belong to a process that has already finished its own work.
            session.agree("end", {})
        except BaseException:
            if file is not None:
                file.close()
            raise
        finally:
            if listener is not None:
                listener.close()


def _decoded(job: "GenerateJob", num_stages: int) -> DecodedRows:
    """The rows that the job's prompts make of the ring."""
    shape = job.options.shape(len(job.prompts) * job.params.num_samples, num_stages)
    lengths = [len(prompt.tokens) for prompt in job.prompts]
    mean, longest = sum(lengths) / len(lengths), max(lengths) + job.params.max_new_tokens
    return DecodedRows(shape.rows_per_slot, mean + job.params.max_new_tokens / 2, shape.num_rows * longest)

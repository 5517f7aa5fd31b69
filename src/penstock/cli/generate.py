"""`penstock generate MODEL [PROMPT ...]`: continues prompts with a saved model."""

import contextlib
import hashlib
import json
import logging
import os
import sys
import tempfile
from argparse import ArgumentTypeError, BooleanOptionalAction
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.commands import Parser, refuse_to_overwrite
from penstock.cli.options import MODEL_OPTIONS, PROCESSES, add_options, options_of, parallel_options, values_of
from penstock.cli.processes.launch import WorkerCommand, launch
from penstock.cli.processes.layout_here import is_free, say_shared_cores
from penstock.cli.processes.meeting import Group, agree, find_group_of
from penstock.cli.processes.memory_limits import check_rows
from penstock.cli.progress import show_log
from penstock.settings import ParallelConfig, RingConfig, SamplingParams, Setting, walk

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from penstock.cli.answers_file import AnswersFile, GenerateJob
    from penstock.engine.folders.model_folder import EngineArguments
    from penstock.engine.generation.decode_cut import DecodingRank

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
_RING = options_of(RingConfig(), {"num_slots": "slots", "rows_per_slot": "rows"}, without=("max_rows_per_slot",))


@dataclass(frozen=True)
class GenerateArguments:
    """One call of the command.

    prompts: from the command line; file: JSON lines; with neither, the prompt is standard input. sampling: settings of
    `SamplingParams` by name, those that were given. bad_words: texts. ring: settings of `RingConfig`. end_tokens: None
    for those of the model. parallel: one pipeline, of which `dp` share the prompts. layout_is_free: none was asked for.
    opened: further arguments of `open_model`.
    """

    model: Path
    prompts: tuple[str, ...]
    file: Path | None
    output: Path | None
    fresh: bool
    sampling: dict[str, Any]
    end_tokens: tuple[int, ...] | None
    bad_words: tuple[str, ...]
    ring: dict[str, Any]
    dp: int
    parallel: ParallelConfig
    layout_is_free: bool
    opened: dict[str, Any]
    special_tokens: bool
    json: bool


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError, OSError: the model, the prompts or the output cannot be used; nothing has been started or written.
    """
    arguments = read_arguments(words)
    show_log(logging.WARNING)
    if arguments.output is not None:
        refuse_to_overwrite(arguments.output, otherwise="give another --output")
    parallel = arguments.parallel
    group, world_size = find_group_of({"pp": parallel.pp, "dp": arguments.dp, "tp": parallel.tp})
    if group is None and arguments.layout_is_free:
        words = [*_fitting_options(arguments), *words]
        arguments = read_arguments(words)
        world_size = arguments.parallel.pp * arguments.dp
    if group is None and world_size > 1:
        return _launch(words, arguments, world_size)
    return _run_worker(arguments, group or Group.alone())


def _launch(words: Sequence[str], arguments: GenerateArguments, world_size: int) -> int:
    """Start the workers, with standard input in a file where it is the prompt: it can be read only once."""
    again = "gives the same answers" if arguments.output is None else "continues where it was stopped"
    command = WorkerCommand("penstock.cli.generate", again, _IMPORTS)
    with contextlib.ExitStack() as stack:
        environ = {}
        if not arguments.prompts and arguments.file is None:
            environ[STANDARD_INPUT] = stack.enter_context(_file_with(_standard_input()))
        num_threads = arguments.parallel.num_threads
        return launch(
            command, words, world_size, num_threads, environ, check=lambda: _check_model(arguments, world_size)
        )


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
    from penstock.cli.texts import open_to_cut

    model, file = open_to_cut(arguments.model, 1, **arguments.opened), arguments.file
    num_prompts = len(arguments.prompts) or 1
    if file is not None and file.is_file():
        with file.open("rb") as lines:
            num_prompts = max(1, sum(1 for _ in lines))
    asked = {**model.sampling, **arguments.sampling}
    params = SamplingParams(**{key: asked[key] for key in ("num_samples", "max_new_tokens") if key in asked})
    num_answers = num_prompts * params.num_samples
    return options_here(model, num_answers, params.max_new_tokens, num_answers, arguments.parallel.device)


def _check_model(arguments: GenerateArguments, world_size: int) -> None:
    """Refuse what no number of processes could do; the prompts are left to them."""
    from penstock.cli.texts import open_to_cut

    open_to_cut(arguments.model, arguments.parallel.pp, **arguments.opened)
    # Not before, so that a refusal stays one sentence.
    say_shared_cores(world_size, arguments.parallel.device)


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
    for own in walk(SamplingParams()):
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
    for options in (_PARALLEL, _RING, MODEL_OPTIONS):
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
    parallel = ParallelConfig(**values_of(given, _PARALLEL))
    return GenerateArguments(
        model=given.model,
        prompts=tuple(given.prompts),
        file=given.file,
        output=given.output or (given.file and given.file.with_suffix(".answers.jsonl")),
        fresh=given.fresh,
        sampling={key: value for key, value in sampling.items() if value is not None},
        end_tokens=tuple(given.end_token or ()) if given.ignore_end or given.end_token else None,
        bad_words=tuple(given.bad_word),
        ring=values_of(given, _RING),
        dp=parallel.dp,
        parallel=replace(parallel, dp=1),
        layout_is_free=is_free(given, _CHOSEN),
        opened=values_of(given, MODEL_OPTIONS) | ({"native": False} if given.no_native else {}),
        special_tokens=not given.no_special_tokens,
        json=given.json,
    )


def check(arguments: GenerateArguments) -> "GenerateJob":
    """Read the model's settings and the prompts.

    Raises: ValueError for prompts that the model cannot continue.
    """
    from penstock.cli.answers_file import GenerateJob
    from penstock.cli.texts import open_to_cut, plainly, prompts_of_texts, read_prompts, tokens_of_word
    from penstock.engine.generation.answers import GenerateOptions, check_prompts
    from penstock.model import Limits

    model = open_to_cut(arguments.model, arguments.parallel.pp, **arguments.opened)
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


def _run_worker(arguments: GenerateArguments, group: Group) -> int:
    """Generate as one process of `group`; returns the exit code."""
    from penstock.cli.processes.session import work_together

    parallel = arguments.parallel
    return work_together(
        group, parallel.num_threads, parallel.timeout_s, lambda store: _generate(arguments, group, store)
    )


def _cut(engine: "EngineArguments", job: "GenerateJob", ranks: "Sequence[DecodingRank]") -> "EngineArguments":
    """An engine's arguments for stages that decode the job's rows equally long. ranks: as `cut_to_decode` has them."""
    from penstock.engine.generation.decode_cut import cut_to_decode

    shape = job.options.shape(len(job.prompts) * job.params.num_samples, engine.layout.pp)
    lengths = [len(prompt.tokens) for prompt in job.prompts]
    mean, longest = sum(lengths) / len(lengths), max(lengths) + job.params.max_new_tokens
    rows = shape.rows_per_slot
    return cut_to_decode(engine, rows, mean + job.params.max_new_tokens / 2, ranks, shape.num_rows * longest)


def _generate(arguments: GenerateArguments, group: Group, store: "Store") -> None:
    from penstock.cli.answers_file import AnswerCollector, AnswerSender, others_answers
    from penstock.cli.processes.measure import measured_ranks
    from penstock.cli.processes.session import Pipelines, choose_device, initialise, refuse_differing, together
    from penstock.cli.progress import Waiting
    from penstock.cli.texts import show_lacking, show_layers
    from penstock.engine.engine import Engine
    from penstock.runtime import Watchdog

    parallel = arguments.parallel
    job = together(store, group, "prompts", lambda: check(arguments))
    if group.rank == 0:
        show_layers(job.model)
        show_lacking(job.model, arguments.sampling)
    refuse_differing(store, group, "answers", {**arguments.sampling, "prompts": [list(p.tokens) for p in job.prompts]})
    device = choose_device(store, group, parallel.device)
    pipelines = Pipelines.of(store, group, arguments.dp, parallel.timeout_s)
    initialise(*pipelines.world(group), device, parallel.timeout_s)
    ranks = measured_ranks(store, group, parallel.pp, device)
    engine = Engine(*_cut(job.model.arguments(replace(parallel, device=device)), job, ranks))
    with Waiting(f"reading weights from {job.model.folder}", sys.stderr, speaks=group.rank == 0):
        version = job.model.load(engine)
    numbers = {name: arguments.opened[name] for name in ("precision", "reproducible")}
    file = together(
        *(store, group, "output"),
        lambda: _answers_file(job, version, numbers, arguments.fresh) if group.rank == 0 else None,
    )
    kept = frozenset(agree(store, group, "kept", {"kept": file.kept if file else []})[0]["kept"])
    listener = None
    if engine.pipeline.holds_first_stage and engine.grid.tp_rank == 0:
        listener = AnswerCollector(job, file, pipelines) if pipelines.index == 0 else AnswerSender(pipelines)
    watchdog = Watchdog.of_run(engine.recorder, parallel.timeout_s, engine.grid.control, engine.grid.pp_ranks)
    try:
        options = replace(job.options, skip=kept | others_answers(job, pipelines))
        prompts = [prompt.tokens for prompt in job.prompts]
        result = engine.generate(
            prompts, job.params, options, listener and listener.on_token, listener and listener.on_answer
        )
        if listener is not None:
            listener.end(result)
        # The store may belong to a process that has already finished its own work.
        agree(store, group, "end", {})
    except BaseException:
        if file is not None:
            file.close()
        raise
    finally:
        if listener is not None:
            listener.close()
        watchdog.close()
        engine.close()

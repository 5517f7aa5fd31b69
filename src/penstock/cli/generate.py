"""`penstock generate MODEL [PROMPT ...]`: continues prompts with a saved model.

Several pipelines share the prompts: each makes its answers, and one process shows or writes all of them.
"""

import contextlib
import hashlib
import itertools
import json
import os
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.input_lines import InputReader, Text
from penstock.cli.options import PROCESSES, Parser, add_options, given_of, options_of, parallel_options, values_of
from penstock.cli.output import Progress, ResultsFile, plain_number, print_json
from penstock.cli.processes.launch import WorkerCommand
from penstock.cli.processes.machine import check_rows, options_here
from penstock.cli.session import (
    IMPORTS,
    RING_OPTIONS,
    ModelCommand,
    show_lacking,
)
from penstock.io.files import text_in
from penstock.settings import SamplingParams

if TYPE_CHECKING:
    from penstock import schedule
    from penstock.engine.folders.model_folder import ModelFolder
    from penstock.engine.generation.answers import GenerateOptions, GenerateResult

STANDARD_INPUT = "PENSTOCK_STANDARD_INPUT"
"""The environment variable that names, for workers, the file with the command's standard input."""

# Those of the settings of `SamplingParams` that the command takes in other forms are added by themselves.
_SAMPLING = options_of(
    SamplingParams(),
    {"num_samples": "samples"},
    without=("logit_bias", "bad_words", "end_tokens", "filter_mask", "begins_with"),
)
_METAVARS = {"temperature": "T", "top_k": "K", "top_p": "P", "min_p": "P", "stop": "TEXT"}
# How often answers of other pipelines are looked for while this one computes, and how often afterwards.
_EVERY_S, _POLL_S = 0.2, 0.02


def parser() -> Parser:
    """The parser of `penstock generate`."""
    parser = Parser(
        "penstock generate",
        """Continue prompts with the model in a folder: that of a run, whose newest checkpoint is taken, or of a Hugging
Face model. Prompts are given on the command line, or as JSON lines ({"prompt": ...}, {"messages": [...]} as
for training, or {"tokens": [...]}, with an "id" that is carried along), or one comes from standard input. Answers to
a file are kept as soon as they have ended: a stopped call continues when it is given again. A token depends on the
seed, its prompt and its place alone: not on the other prompts, nor on --pp, --dp, --slots and --rows.""",
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
    add_options(sampling, _SAMPLING, _METAVARS, switches=True)
    sampling.add_argument(
        "--logit-bias", action="append", type=_bias, metavar="ID=X", help="added to the logit of the token with that id"
    )
    sampling.add_argument(
        "--bad-word", action="append", default=[], metavar="TEXT", help="a text whose tokens no answer completes"
    )
    sampling.add_argument("--end-token", type=int, action="append", metavar="ID", help="default: the model's own")
    sampling.add_argument("--ignore-end", action="store_true", help="no end token but those given ends an answer")
    ring = parser.add_argument_group("how it runs (where no layout is given, as fits this machine)")
    Generate.add_options(ring, RING_OPTIONS)
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="texts without the tokenizer's own, such as one to begin with"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and progress to standard error")
    return parser


def _bias(word: str) -> tuple[int, float]:
    token, _, bias = word.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ArgumentTypeError(f"{word!r} is no bias; give a token id and a number, such as 17=-2.5") from None


class Generate(ModelCommand):
    """One call of the command; the pipelines share the prompts."""

    parser = staticmethod(parser)
    layout = parallel_options(("pp", "dp", "tp", *PROCESSES))
    chosen = ("pp", "dp", "tp", "threads")
    #: says how a stopped call is taken up
    workers: WorkerCommand = WorkerCommand("penstock.cli.generate", "gives the same answers", IMPORTS)

    #: where answers go; None if they are only shown
    output: Path | None
    #: settings of `RingConfig`, and those of `SamplingParams` that are given
    ring: dict[str, Any]
    sampling: dict[str, Any]
    #: what `read` has found: the model, the prompts, and how they are continued
    model: "ModelFolder"
    prompts: Sequence[Text]
    params: SamplingParams
    options: "GenerateOptions"

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        given = self.given
        if given.file is not None and given.prompts:
            raise ValueError(f"prompts are given twice: {given.prompts[0]!r} and --file {given.file}; give one of them")
        if given.output is not None and given.file is None:
            raise ValueError("--output is where the answers to --file go; give --file, or leave it out")
        if given.fresh and given.file is None:
            raise ValueError(
                "--fresh drops answers to --file that a stopped call has left; give --file, or leave it out"
            )
        self.output = given.output or (given.file and given.file.with_suffix(".answers.jsonl"))
        if self.output is not None:
            self.workers = replace(self.workers, again="continues where it was stopped")
        self.ring, self.sampling = values_of(given, RING_OPTIONS), given_of(given, _SAMPLING)
        if given.logit_bias:
            self.sampling["logit_bias"] = dict(given.logit_bias)

    @contextlib.contextmanager
    def environ(self) -> Iterator[dict[str, str]]:
        """Put standard input into a file where it is the prompt: it can be read only once."""
        if self.given.prompts or self.given.file is not None:
            yield {}
            return
        with _file_with(_standard_input()) as path:
            yield {STANDARD_INPUT: path}

    def fit(self) -> list[str]:
        """The options of the layout in which this machine is expected to end first.

        Raises: ValueError for a model that cannot be run here.
        """
        model, file = self.look(), self.given.file
        num_prompts = len(self.given.prompts) or 1
        if file is not None and file.is_file():
            with file.open("rb") as lines:
                num_prompts = max(1, sum(1 for _ in lines))
        asked = {**model.sampling, **self.sampling}
        params = SamplingParams(**{key: asked[key] for key in ("num_samples", "max_new_tokens") if key in asked})
        num_answers = num_prompts * params.num_samples
        return options_here(model, num_answers, params.max_new_tokens, num_answers, self.parallel.device)

    def read(self) -> None:
        """Read the model's settings and the prompts.

        Raises: ValueError for prompts that the model cannot continue.
        """
        from penstock.engine.generation.answers import GenerateOptions, check_prompts
        from penstock.model import Limits

        given, model = self.given, self.look()
        model = model.without_special_tokens() if given.no_special_tokens else model
        if self.sampling.get("stop") and model.tokenizer is None:
            raise ValueError(f"--stop is a text, but {model.folder} has no tokenizer; give --end-token ids")
        has_ends = given.ignore_end or given.end_token
        reader = InputReader(model)
        words = [tokens for word in given.bad_word for tokens in reader.tokens_of_word(word)]
        words += map(tuple, model.sampling.get("bad_words", ()))
        ends = {"end_tokens": tuple(given.end_token or ()) if has_ends else model.end_tokens, "bad_words": tuple(words)}
        params = SamplingParams(**{**model.sampling, **self.sampling, **ends})
        if given.file is not None:
            prompts = reader.prompts(given.file)
        else:
            prompts = reader.prompts_of(given.prompts or [_standard_input()])
        limits = Limits(model.vocab_size, model.max_length)
        names = [prompt.name(number, given.file) for number, prompt in enumerate(prompts)]
        check_prompts([prompt.tokens for prompt in prompts], [params] * len(prompts), limits, names)
        options = GenerateOptions(**self.ring, tokenizer=model.tokenizer)
        shape = options.shape(len(prompts) * params.num_samples, self.parallel.pp)
        longest = max(len(prompt.tokens) for prompt in prompts) + params.max_new_tokens
        check_rows(shape.num_slots, shape.num_rows, longest, model, self.parallel.device)
        self.model, self.prompts, self.params, self.options = model, prompts, params, options

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.params.num_samples

    def number(self, answer: dict[str, Any]) -> int:
        """The number of an answer in a file."""
        return answer["prompt"] * self.params.num_samples + answer["sample"]

    def is_answer(self, line: Any) -> bool:
        """Return whether a line of a file is that of an answer."""
        prompt, sample = (line.get("prompt"), line.get("sample")) if isinstance(line, dict) else (None, None)
        return type(prompt) is int and type(sample) is int and prompt >= 0 and 0 <= sample < self.params.num_samples

    def work(self) -> None:
        self.together("prompts", self.read)
        prompts, params, is_first = [prompt.tokens for prompt in self.prompts], self.params, self.group.rank == 0
        if is_first:
            show_lacking(self.model, self.sampling)
        self.refuse_differing("answers", {**self.sampling, "prompts": [list(prompt) for prompt in prompts]})
        shape = self.options.shape(self.num_answers, self.parallel.pp)
        mean, longest = sum(map(len, prompts)) / len(prompts), max(map(len, prompts)) + params.max_new_tokens
        # Answers are on their way from the first token to the last: half of the longest, on average.
        decoded = (shape.rows_per_slot, mean + params.max_new_tokens / 2, shape.num_rows * longest)
        with self.open(self.model, decoded) as (engine, version), contextlib.ExitStack() as stack:
            file = self.together("output", lambda: self._results(version) if is_first else None)
            stack.enter_context(file or contextlib.nullcontext())
            there = [self.number(answer) for answer in file.read()] if file is not None else []
            kept = frozenset(self.agree("kept", {"kept": there})[0]["kept"])
            own, names = self.pipelines, _names(self.pipelines.index)
            reports, collector = engine.pipeline.holds_first_stage and engine.grid.tp_rank == 0, None
            if reports and own.index == 0:
                collector = AnswerCollector(self, file, kept)

            def hand_over(number: int, answer: "schedule.Sequence") -> None:
                assert answer.ending is not None
                own.hand_over(next(names), {"answer": [number, answer.generated, answer.ending.value]})

            # A prompt whose samples stay together is read once, unless that would leave pipelines without work.
            together = params.num_samples if len(prompts) >= own.count else 1
            skip = kept.union(n for n in range(self.num_answers) if n // together % own.count != own.index)
            on_token = collector and collector.on_token
            on_answer = collector.on_answer if collector is not None else hand_over if reports else None
            try:
                result = engine.generate(prompts, params, replace(self.options, skip=skip), on_token, on_answer)
                if collector is not None:
                    collector.end(result)
                elif reports:
                    figures = [result.wall_s, result.busy_s, result.num_forwards, result.num_rounds]
                    own.hand_over(next(names), {"figures": figures})
                # The store may belong to a process that has already finished its own work.
                self.agree("end", {})
            finally:
                if collector is not None:
                    collector.close()

    def _results(self, version: str) -> ResultsFile | None:
        """Open the file of answers, with those that a stopped call left there.

        Raises: ValueError if the file cannot be written, or its answers belong to other input.
        """
        if self.output is None:
            return None
        given = [[list(prompt.tokens), prompt.line, prompt.id] for prompt in self.prompts]
        numbers = {name: self.opened[name] for name in ("precision", "reproducible")}
        decisive = [str(self.model.folder.resolve()), version, given, asdict(self.params), numbers]
        digest = hashlib.blake2b(json.dumps(decisive).encode(), digest_size=8).hexdigest()
        return ResultsFile(self.output, digest, self.is_answer, alone=True, fresh=self.given.fresh)


main = Generate.main


@contextlib.contextmanager
def _file_with(text: str) -> Iterator[str]:
    """The path of a file with this text; on Linux it has no name, so that nothing is left however this process ends."""
    is_nameless = sys.platform == "linux"
    make = tempfile.TemporaryFile if is_nameless else tempfile.NamedTemporaryFile
    with make("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}" if is_nameless else file.name


def _standard_input() -> str:
    path = os.environ.get(STANDARD_INPUT)
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    if sys.stdin.isatty():
        print("penstock: type the prompt, and Ctrl-D to end it", file=sys.stderr)
    # A test, or a program that calls `main`, may have put a text in its place.
    bytes_of = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if bytes_of is None else text_in(bytes_of.read(), "standard input")


# ---- Answers as they come: those of this pipeline, and those that others hand over


@dataclass(eq=False)
class AnswerCollector:
    """Shows and writes the answers of this pipeline and those that the others hand over.

    In the terminal, answers are printed one after another: the first as it grows, the others in turn. Otherwise only
    the number of ended answers is shown. A file gets each answer as soon as it has ended, JSON output gets all of them
    at the end.
    """

    #: the call, where answers are written (None if they are only shown), and answers of an earlier call
    _call: Generate
    _file: ResultsFile | None
    _kept: frozenset[int]
    #: answer -> its text and its number of tokens
    _texts: list[Any] = field(init=False)
    _num_tokens: list[int] = field(init=False)
    #: answers of earlier calls and of this one that have ended
    _num_ended: int = field(init=False)
    #: answer -> what of it is not printed yet, from its heading on; those that have ended; the one that grows
    _waiting: list[str] = field(init=False)
    _ended: set[int] = field(default_factory=set, init=False)
    _current: int = field(default=0, init=False)
    #: shows how many answers are done; None where their texts are shown
    _progress: Progress | None = field(default=None, init=False)
    #: other pipeline -> the names of its messages, the next one first
    _names: dict[int, Iterator[str]] = field(init=False)
    #: pipeline -> the name of the message that comes next; without those whose figures have come
    _awaited: dict[int, str] = field(init=False)
    #: all sequences, by number; those of other pipelines get their answers here
    _sequences: "list[schedule.Sequence]" = field(init=False)
    #: the figures of other pipelines
    _figures: list[Any] = field(default_factory=list, init=False)
    #: when messages were last looked for, in seconds
    _looked_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        from penstock.engine.generation.answers import AnswerText
        from penstock.schedule import Sequence as Made

        call = self._call
        self._texts = [AnswerText(call.model.tokenizer, call.params.stop) for _ in range(call.num_answers)]
        self._num_tokens = [0] * call.num_answers
        self._num_ended = len(self._kept)
        self._waiting = [self._heading(number) for number in range(call.num_answers)]
        if call.output is not None or call.given.json:
            shown = sys.stderr if call.given.json else sys.stdout
            self._progress = Progress(call.num_answers, self._num_ended, shown, "answer")
        self._names = {index: _names(index) for index in range(1, call.pipelines.count)}
        self._awaited = {index: next(names) for index, names in self._names.items()}
        self._sequences = Made.all_of([p.tokens for p in call.prompts], [call.params] * len(call.prompts))

    def on_token(self, number: int, token: int) -> None:
        """Show a token, and now and then look for answers of other pipelines."""
        self._hear(number, token)
        if self._awaited and time.monotonic() - self._looked_s > _EVERY_S:
            self._look()

    def on_answer(self, number: int, answer: "schedule.Sequence") -> None:
        """Write an answer that has ended."""
        if self._file is not None:
            self._file.write([self._described(number, answer)], to_disk=False)

    def end(self, result: "GenerateResult") -> None:
        """Wait for the other pipelines, write or print all answers, and report the speed."""
        while self._awaited:
            self._look()
            time.sleep(_POLL_S)
        self.close()
        merged = zip(self._sequences, result, strict=True)
        result = replace(result, sequences=tuple(theirs if theirs.ending else own for theirs, own in merged))
        for wall_s, busy_s, num_forwards, num_rounds in self._figures:
            result = replace(
                result,
                wall_s=max(result.wall_s, wall_s),
                busy_s=(*result.busy_s, *busy_s),
                num_forwards=(*result.num_forwards, *num_forwards),
                num_rounds=max(result.num_rounds, num_rounds),
            )
        if self._file is not None:
            self._file.publish(self._call.number)
        if self._call.given.json:
            content: dict[str, Any] = {"resumed_from": len(self._kept)}
            if self._file is None:
                content = {"answers": [self._described(number, answer) for number, answer in enumerate(result)]}
            figures = {
                "num_tokens": result.num_tokens,
                "time_s": result.wall_s,
                "tokens_per_s": result.tokens_per_s,
                "idle_share": result.idle_share,
            }
            print_json({"model": str(self._call.model.folder), **content, **figures})
        elif self._file is not None:
            kept = f" ({len(self._kept)} of them there already)" if len(self._kept) else ""
            print(
                f"{len(result)} answers{kept}, {result.num_tokens:,} tokens, {result.tokens_per_s:,.0f} tokens/s, "
                f"idle {result.idle_share:.1%}; wrote {self._call.output}"
            )

    def close(self) -> None:
        """Leave the terminal in order."""
        if self._progress is not None:
            self._progress.close()

    def _hear(self, number: int, token: int) -> None:
        """Add an answer's next token."""
        text, params = self._texts[number], self._call.params
        self._num_tokens[number] += 1
        new = text.add(token)
        ended = token in params.end_tokens or self._num_tokens[number] == params.max_new_tokens
        if ended or text.stopped:
            new += text.finish()
            self._ended.add(number)
            self._num_ended += 1
        if self._progress is not None:
            self._progress.count(self._num_ended, 1)
            return
        self._waiting[number] += new + ("\n" if number in self._ended else "")
        while self._current < len(self._waiting):
            self._print(self._waiting[self._current])
            self._waiting[self._current] = ""
            if self._current not in self._ended:
                return
            self._current += 1

    def _print(self, text: str) -> None:
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:
            from penstock.cli.processes.session import reports_first

            # The others will hear that this process has failed, and need not say so.
            reports_first(self._call.store)
            raise

    def _heading(self, number: int) -> str:
        """The prompt, which the answer follows; with several answers, below a line that names it."""
        prompt, sample = divmod(number, self._call.params.num_samples)
        text = self._call.prompts[prompt].text or ""
        if self._call.num_answers == 1:
            return text
        of_samples = f", sample {sample}" if self._call.params.num_samples > 1 else ""
        return f"{'' if number == 0 else chr(10)}--- prompt {prompt}{of_samples} ---\n{text}"

    def _described(self, number: int, answer: "schedule.Sequence") -> dict[str, Any]:
        prompt = self._call.prompts[answer.prompt]
        described: dict[str, Any] = {"prompt": answer.prompt, "sample": answer.sample}
        if prompt.line is not None:
            described["line"] = prompt.line
        if prompt.id is not None:
            described["id"] = prompt.id
        described |= {
            "text": self._texts[number].text,
            "tokens": list(answer.tokens),
            "log_probs": [plain_number(value) for value in answer.log_probs],
            "ending": answer.ending and answer.ending.value,
        }
        if answer.raw_log_probs is not None:
            described["raw_log_probs"] = [plain_number(value) for value in answer.raw_log_probs]
        if answer.top_log_probs is not None:
            described["top_log_probs"] = [
                [[token, plain_number(value)] for token, value in likeliest] for likeliest in answer.top_log_probs
            ]
        return described

    def _look(self) -> None:
        """Take what other pipelines have handed over."""
        from penstock.schedule import Ending, Token

        for index, names in self._names.items():
            while index in self._awaited and self._call.pipelines.has(self._awaited[index]):
                message = self._call.pipelines.receive(self._awaited[index], f"answer from pipeline {index}")
                if "figures" in message:
                    self._figures.append(message["figures"])
                    del self._awaited[index]
                    continue
                self._awaited[index] = next(names)
                number, generated, ending = message["answer"]
                answer = self._sequences[number]
                for fields in generated:
                    token = Token(*fields)
                    answer.generated.append(token._replace(likeliest=tuple((n, x) for n, x in token.likeliest)))
                    self._hear(number, token.id)
                answer.ending = Ending(ending)
                self.on_answer(number, answer)
        self._looked_s = time.monotonic()


def _names(index: int) -> Iterator[str]:
    """The names of a pipeline's messages."""
    return (f"answers/{index}/{number}" for number in itertools.count())

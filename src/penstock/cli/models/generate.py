"""`penstock generate MODEL [PROMPT ...]`: continues prompts with a saved model.

Several pipelines share the prompts: each makes its answers, and one process shows or writes all of them.
"""

import sys
import time
from argparse import SUPPRESS, ArgumentTypeError
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.models.input_lines import InputReader, Text
from penstock.cli.models.session import IMPORTS, RING_OPTIONS, ModelCommand
from penstock.cli.options import PROCESSES, Parser, add_options, given_of, options_of, parallel_options, values_of
from penstock.cli.output import Progress, ResultsFile, plain_number, print_json
from penstock.cli.processes.launch import WorkerCommand
from penstock.cli.processes.machine import check_rows, options_here
from penstock.io.files import text_in
from penstock.settings import SamplingParams

if TYPE_CHECKING:
    from penstock import schedule
    from penstock.engine.generation.answers import AnswerText
    from penstock.engine.generation.options import GenerateOptions

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
    parser.add_argument("--standard-input", help=SUPPRESS)
    parser.add_argument("--file", type=Path, metavar="FILE.jsonl", help="prompts, a JSON object a line")
    parser.add_argument("--output", type=Path, metavar="OUT.jsonl", help="default with --file: FILE.answers.jsonl")
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
    workers: WorkerCommand = WorkerCommand("penstock.cli.models.generate", "gives the same answers", IMPORTS)

    #: where answers go; None if they are only shown
    output: Path | None
    #: settings of `RingConfig`, and those of `SamplingParams` that are given
    ring: dict[str, Any]
    sampling: dict[str, Any]
    #: what `read` has found: the prompts, and how they are continued
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
        self.output = given.output or (given.file and given.file.with_suffix(".answers.jsonl"))
        if self.output is not None:
            self.workers = replace(self.workers, again="continues where it was stopped")
        self.ring, self.sampling = values_of(given, RING_OPTIONS), given_of(given, _SAMPLING)
        if given.logit_bias:
            self.sampling["logit_bias"] = dict(given.logit_bias)

    def words_of_workers(self) -> list[str]:
        """The command's words, with the text of standard input where it is the prompt: it can be read only once."""
        is_given = self.given.prompts or self.given.file is not None
        return [*self.words, *([] if is_given else [f"--standard-input={_standard_input()}"])]

    def fit(self) -> list[str]:
        """The options of the layout in which this machine is expected to end first.

        Raises: ValueError for a model that cannot be run here.
        """
        model, file = self.look(), self.given.file
        num_prompts = len(self.given.prompts) or 1
        if file is not None and file.is_file():
            with file.open("rb") as lines:
                num_prompts = max(1, sum(1 for _ in lines))
        num_answers = num_prompts * {**model.sampling, **self.sampling}.get("num_samples", 1)
        return options_here(model, num_answers, num_answers, self.parallel.device)

    def read(self) -> None:
        """Read the model's settings and the prompts.

        Raises: ValueError for prompts that the model cannot continue.
        """
        from penstock.engine.generation.options import GenerateOptions
        from penstock.engine.generation.prompts import check_prompts
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
            text = given.standard_input
            prompts = reader.prompts_of(given.prompts or [_standard_input() if text is None else text])
        limits = Limits(model.vocab_size, model.config.max_length)
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

    def line(self, answer: "schedule.Sequence") -> dict[str, Any]:
        """The line of an answer in a file."""
        from penstock.engine.generation.answers import AnswerText

        prompt, text = self.prompts[answer.prompt], AnswerText(self.model.tokenizer, self.params.stop)
        for token in answer.tokens:
            text.add(token)
        text.finish()
        line: dict[str, Any] = {"prompt": answer.prompt, "sample": answer.sample}
        line |= {name: value for name, value in (("line", prompt.line), ("id", prompt.id)) if value is not None}
        line |= {"text": text.text, "tokens": list(answer.tokens), "log_probs": [*map(plain_number, answer.log_probs)]}
        line["ending"] = answer.ending and answer.ending.value
        if answer.raw_log_probs is not None:
            line["raw_log_probs"] = [*map(plain_number, answer.raw_log_probs)]
        if answer.top_log_probs is not None:
            line["top_log_probs"] = [
                [[token, plain_number(value)] for token, value in likeliest] for likeliest in answer.top_log_probs
            ]
        return line

    def work(self) -> None:
        self.meeting.together("prompts", self.read)
        prompts, params = [prompt.tokens for prompt in self.prompts], self.params
        self.meeting.refuse_differing("answers", {**self.sampling, "prompts": [list(prompt) for prompt in prompts]})
        shape = self.options.shape(self.num_answers, self.parallel.pp)
        mean = sum(map(len, prompts)) / len(prompts)
        # Answers are on their way from the first token to the last: half of the longest, on average.
        given = [[list(prompt.tokens), prompt.line, prompt.id] for prompt in self.prompts]
        with (
            self.open(self.model, (shape.rows_per_slot, mean + params.max_new_tokens / 2)) as (engine, version),
            self.results([version, given, asdict(params)], ("prompt", "sample"), self.group.rank == 0) as file,
        ):
            lines = file.read() if file is not None else []
            numbers = [line["prompt"] * params.num_samples + line["sample"] for line in lines]
            kept = frozenset(self.meeting.exchange("kept", numbers)[0])
            pipelines = self.pipelines
            # A prompt whose samples stay together is read once, unless that would leave pipelines without work.
            together = params.num_samples if len(prompts) >= pipelines.count else 1
            parts = [set[int]() for _ in range(pipelines.count)]
            for number in set(range(self.num_answers)) - kept:
                parts[number // together % pipelines.count].add(number)
            skip = frozenset(range(self.num_answers)) - parts[pipelines.index]
            reports = engine.pipeline.holds_first_stage and engine.grid.tp_rank == 0
            answers = None
            if reports and pipelines.index == 0:
                answers = Answers(self, file, len(kept), [0, *map(len, parts[1:])])

            def on_answer(number: int, answer: "schedule.Sequence") -> None:
                if answers is not None:
                    answers.add(number, self.line(answer))
                elif reports:
                    pipelines.send([number, self.line(answer)])

            on_token = None if answers is None else answers.on_token
            result = engine.generate(prompts, params, replace(self.options, skip=skip), on_token, on_answer)
            if answers is not None:
                answers.wait()
            # The store may belong to a process that has already finished its own work.
            figures = self.meeting.exchange("end", [result.wall_s, result.busy_s if reports else ()])
            if answers is not None:
                answers.report(max(wall_s for wall_s, _ in figures), [s for _, busy_s in figures for s in busy_s])


main = Generate.main


def _standard_input() -> str:
    if sys.stdin.isatty():
        print("penstock: type the prompt, and Ctrl-D to end it", file=sys.stderr)
    # A test, or a program that calls `main`, may have put a text in its place.
    bytes_of = getattr(sys.stdin, "buffer", None)
    return sys.stdin.read() if bytes_of is None else text_in(bytes_of.read(), "standard input")


# ---- Answers as they come: those of this pipeline, and those that others send


@dataclass
class Answers:
    """The answers of all pipelines, in the process that shows and writes them.

    In the terminal, answers are printed one after another as soon as they have ended, and a single one as it grows.
    Otherwise only the number of ended answers is shown. A file gets each answer as soon as it has ended, JSON output
    gets all of them at the end.
    """

    #: the call, where answers are written (None if they are only shown), and how many an earlier call has written
    call: Generate
    file: ResultsFile | None
    num_kept: int
    #: pipeline -> its answers that are still to come
    awaited: list[int]
    #: number -> the line of an answer that has ended in this call, and the number of their tokens
    _lines: dict[int, Any] = field(default_factory=dict)
    _num_tokens: int = 0
    #: shows how many answers are done; None where their texts are shown
    _progress: Progress | None = None
    #: a single answer's text as it grows
    _growing: "AnswerText | None" = None
    #: the answer that is printed next, and the characters of it that have been
    _current: int = 0
    _num_printed: int = 0
    #: when other pipelines were last asked for answers, in seconds
    _looked_s: float = 0.0

    def __post_init__(self) -> None:
        from penstock.engine.generation.answers import AnswerText

        call = self.call
        if call.output is not None or call.given.json:
            shown = sys.stderr if call.given.json else sys.stdout
            self._progress = Progress(call.num_answers, self.num_kept, shown, "answer")
        elif call.num_answers == 1:
            self._growing = AnswerText(call.model.tokenizer, call.params.stop)
            self._print(self._heading(0))

    def on_token(self, number: int, token: int) -> None:
        """Show a token of this pipeline, and now and then look for answers of others."""
        if self._progress is not None:
            self._progress.count(self.num_kept + len(self._lines), 1)
        elif self._growing is not None:
            self._print(self._growing.add(token))
        if any(self.awaited) and time.monotonic() - self._looked_s > _EVERY_S:
            self._look()

    def add(self, number: int, line: dict[str, Any]) -> None:
        """Write and show an answer that has ended."""
        self._lines[number] = line if self.file is None else None
        self._num_tokens += len(line["tokens"])
        if self.file is not None:
            self.file.write([line], to_disk=False)
        if self._progress is not None:
            self._progress.count(self.num_kept + len(self._lines), 0)
            return
        while self._current in self._lines:
            text = f"{self._heading(self._current)}{self._lines[self._current]['text']}\n"
            self._print(text[self._num_printed :])
            self._current, self._num_printed = self._current + 1, 0

    def wait(self) -> None:
        """Wait for the answers of the other pipelines."""
        while any(self.awaited):
            self._look()
            time.sleep(_POLL_S)

    def report(self, wall_s: float, busy_s: Sequence[float]) -> None:
        """Give the file its name or print all answers, and the speed; `busy_s` is that of each rank, if known."""
        from penstock.engine.generation.answers import idle_share

        call, num_tokens = self.call, self._num_tokens
        speed = num_tokens / wall_s if wall_s else 0.0
        idle = idle_share(wall_s, busy_s)
        idle_words = "-" if idle is None else f"{idle:.1%}"
        if self.file is not None:
            self.file.publish()
        if call.given.json:
            content: dict[str, Any] = {"resumed_from": self.num_kept}
            if self.file is None:
                content = {"answers": [line for _, line in sorted(self._lines.items())]}
            figures = {"num_tokens": num_tokens, "time_s": wall_s, "tokens_per_s": speed, "idle_share": idle}
            print_json({"model": str(call.model.folder), **content, **figures})
        elif self.file is not None:
            kept = f" ({self.num_kept} of them there already)" if self.num_kept else ""
            print(
                f"{call.num_answers} answers{kept}, {num_tokens:,} tokens, {speed:,.0f} tokens/s, "
                f"idle {idle_words}; wrote {call.output}"
            )

    def _look(self) -> None:
        """Take what other pipelines have sent."""
        pipelines = self.call.pipelines
        for index in range(pipelines.count):
            while self.awaited[index] and pipelines.has(index):
                self.add(*pipelines.receive(index, f"answer from pipeline {index}"))
                self.awaited[index] -= 1
        self._looked_s = time.monotonic()

    def _print(self, text: str) -> None:
        try:
            print(text, end="", flush=True)
        except BrokenPipeError:
            from penstock.cli.processes.session import reports_first

            # The others will hear that this process has failed, and need not say so.
            reports_first(self.call.meeting.store)
            raise
        self._num_printed += len(text)

    def _heading(self, number: int) -> str:
        """The prompt, which the answer follows; with several answers, below a line that names it."""
        prompt, sample = divmod(number, self.call.params.num_samples)
        text = self.call.prompts[prompt].text or ""
        if self.call.num_answers == 1:
            return text
        of_samples = f", sample {sample}" if self.call.params.num_samples > 1 else ""
        return f"{'' if number == 0 else chr(10)}--- prompt {prompt}{of_samples} ---\n{text}"

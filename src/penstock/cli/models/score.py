"""`penstock score MODEL FILE.jsonl`: each token's log-probability, and each text's perplexity.

Batches of texts are shared out among pipelines, and one process writes the lines of all.
"""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.models.input_lines import InputReader, Text
from penstock.cli.models.session import IMPORTS, ModelCommand
from penstock.cli.options import PROCESSES, Parser, options_of, parallel_options, values_of
from penstock.cli.output import Progress, ResultsFile, counted, digest_of, plain_number, print_json
from penstock.cli.processes.launch import WorkerCommand
from penstock.settings import DataConfig, Settings, same_as
from penstock.settings.declare import ABOVE_0, AT_LEAST_1, setting

if TYPE_CHECKING:
    from penstock.data import MicroBatchSpec, PackedBatch
    from penstock.engine.engine import Engine
    from penstock.engine.folders.model_folder import ModelFolder

MICROBATCH_TOKENS = 2048
"""Enough tokens for a microbatch to be worth its overhead, and few enough that its logits stay small."""

NOT_A_NUMBER = "are not numbers: a weight or an activation is NaN or infinite, so nothing can be scored"
"""The end of the sentence on scores that are NaN."""

# A batch is written at once, and is the most that is lost when the command is stopped. Batches and microbatches do not
# depend on the number of stages or pipelines, so neither does any bit of the file.
_MICROBATCHES = 8


@dataclass(frozen=True)
class ScoreConfig(Settings, section="score"):
    """Settings of scoring."""

    max_tokens: int | None = setting(
        None, "Tokens of a microbatch, at most; left out, 2048 or the longest text.", AT_LEAST_1
    )
    temperature: float = setting(1.0, "Divides the logits.", ABOVE_0)
    text_field: str = same_as(DataConfig, "text_field")


_SCORING = options_of(ScoreConfig())


def parser() -> Parser:
    parser = Parser(
        "penstock score",
        """Write each token's log-probability, in nats, and each text's perplexity. MODEL is the folder of a run,
whose newest checkpoint is taken, or of a Hugging Face model. A line of FILE is {"text": ...}, or {"tokens": [...]}
with token ids, or {"prompt": ..., "completion": ...}, each a text or token ids, of which the completion is scored.
An "id" is carried along. A call that was stopped is continued by the same command; no file is ever overwritten.
With a reward model, or another classifier, a line has the text's "reward" ("rewards" of several labels), or its tokens'
"values"; there a line of FILE may be {"messages": [...]}, which the chat template writes. Texts are rated as they
stand, but training on texts ends each with the tokenizer's end token: a text to be rated so needs it at its end.""",
        examples=(
            ("penstock score runs/demo texts.jsonl", "writes texts.scores.jsonl"),
            ("penstock score runs/demo texts.jsonl --pp 2 --json", "two stages, and a summary as JSON"),
            ("penstock score runs/demo texts.jsonl --dp 4", "four models, each with its part of the texts"),
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="the texts, a JSON object a line")
    parser.add_argument("--output", type=Path, metavar="OUT.jsonl", help="default: FILE.scores.jsonl beside FILE")
    Score.add_options(parser, _SCORING, metavars={"temperature": "T", "text_field": "NAME"})
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="texts without the tokenizer's own, such as one to begin with"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and progress to standard error")
    return parser


class Score(ModelCommand):
    """One call of the command; the pipelines share the texts."""

    parser = staticmethod(parser)
    layout = parallel_options(("pp", "dp", "cp", "tp", *PROCESSES))
    workers = WorkerCommand("penstock.cli.models.score", "continues where it was stopped", IMPORTS)
    only_reads = True

    #: where the lines are written, and how they are computed
    output: Path  # pyright: ignore[reportIncompatibleVariableOverride]
    scoring: ScoreConfig
    #: what `read` has found: the texts, and the most tokens of a microbatch
    texts: Sequence[Text]
    max_tokens: int

    def __init__(self, words: Sequence[str]) -> None:
        super().__init__(words)
        self.output = self.given.output or self.given.file.with_suffix(".scores.jsonl")
        self.scoring = ScoreConfig(**values_of(self.given, _SCORING))

    def look(self) -> "ModelFolder":
        """Open the model, which may be one that rates texts. Raises: ValueError."""
        model = self.open_to_cut(may_rate=True)
        if model.rates is not None and self.scoring.temperature != 1.0:
            raise ValueError(f"--temperature divides the logits of tokens, but {model.folder} rates {model.rates}")
        return model

    def read(self) -> None:
        """Read the model's settings and the texts. Raises: ValueError for input that cannot be scored."""
        model = self.look()
        model = model.without_special_tokens() if self.given.no_special_tokens else model
        texts, most = InputReader(model).texts(self.given.file, self.scoring.text_field), self.scoring.max_tokens
        longest = max(texts, key=lambda text: len(text.tokens))
        if most is not None and len(longest.tokens) > most:
            raise ValueError(
                f"{self.given.file}, line {longest.line}: has {len(longest.tokens)} tokens, more than --max-tokens "
                f"{most}; no text is cut, so give at least that"
            )
        self.model, self.texts = model, texts
        self.max_tokens = most or max(MICROBATCH_TOKENS, len(longest.tokens))

    @property
    def batches(self) -> list[Sequence[Text]]:
        """The texts, in order, in parts of about so many tokens."""
        parts, start, size = [], 0, 0
        for end, text in enumerate(self.texts, 1):
            size += len(text.tokens)
            if size >= self.max_tokens * _MICROBATCHES or end == len(self.texts):
                parts.append(self.texts[start:end])
                start, size = end, 0
        return parts

    @property
    def spec(self) -> "MicroBatchSpec":
        """Microbatches of a batch; under context parallelism as few as `max_tokens` allows."""
        from penstock.data import MicroBatchSpec

        num = _MICROBATCHES if self.parallel.cp == 1 else None
        return MicroBatchSpec(num=num, max_tokens=self.max_tokens, allow_fewer=True)

    def line(self, text: Text, values: Sequence[Any]) -> dict[str, Any]:
        """The line of a text, from what the model's head gives for each of its tokens.

        That is the log-probability of the token's successor, of which the last token has none; without scored tokens
        the perplexity is None. Of a reward model, another classifier or a value model it is a number for each label.

        Source: transformers' sequence classification, which rates a text by its last token that is no padding.
        """
        line: dict[str, Any] = {"line": text.line, **({} if text.id is None else {"id": text.id})}
        if self.model.rates is None:
            log_probs = [plain_number(value) for value in values[text.first_scored - 1 : -1]]
            total, tokens = _total(log_probs), list(text.tokens[text.first_scored :])
            figures = {"log_prob": total, "perplexity": _perplexity(total, len(tokens))}
            return line | {"tokens": tokens, "log_probs": log_probs} | figures
        ratings = [[plain_number(value) for value in labels] for labels in values]
        if self.model.rates == "tokens":
            return line | {"values": [labels[0] if len(labels) == 1 else labels for labels in ratings]}
        from penstock.data.examples import rated_place

        rated = ratings[rated_place(text.tokens, self.model.pad_token)]
        return line | ({"reward": rated[0]} if len(rated) == 1 else {"rewards": rated})

    def work(self) -> None:
        self.meeting.together("texts", self.read)
        # What the scores depend on, beside the model.
        decisive = {
            "temperature": self.scoring.temperature,
            "text_field": self.scoring.text_field,
            "special_tokens": not self.given.no_special_tokens,
            "max_tokens": self.max_tokens,
            "texts": digest_of([[text.line, text.id, text.tokens, text.num_prompt_tokens] for text in self.texts]),
        }
        self.meeting.refuse_differing("scoring", {**decisive, **self.opened})
        with self.open(self.model) as (engine, version):
            # Ranks that share the last stage have the same results; one of them delivers.
            delivers = engine.pipeline.gives_results and (engine.grid.tp_rank, engine.grid.cp_rank) == (0, 0)
            with self.results([version, decisive], ("line",), delivers and self.pipelines.index == 0) as file:
                self._score(engine, file, delivers)

    def _score(self, engine: "Engine", file: ResultsFile | None, delivers: bool) -> None:
        """Score all texts, and write and report their lines where the file is."""
        summary, num_done = Summary(), 0
        if file is not None:
            # A batch that a killed call left incomplete is scored again.
            left = {line["line"]: line for line in file.read()}
            done = list(takewhile(lambda texts: all(text.line in left for text in texts), self.batches))
            summary.add([left[text.line] for texts in done for text in texts])
            summary.resumed_from, num_done = summary.num_lines, len(done)
        first = max(self.meeting.exchange("done", num_done))
        start_s = time.perf_counter()
        shown = sys.stderr if self.given.json else sys.stdout
        progress = Progress(len(self.texts), summary.num_lines, shown, "line") if file is not None else None
        for number, texts in list(enumerate(self.batches))[first:]:
            lines = self._lines_of_all(engine, number, texts, delivers)
            if file is not None and progress is not None and lines is not None:
                file.write(lines, to_disk=True)
                summary.add(lines)
                progress.count(summary.num_lines, sum(len(text.tokens) for text in texts))
        # The store may belong to a process that has already finished its own work.
        self.meeting.exchange("end", None)
        if file is not None and progress is not None:
            summary.time_s = time.perf_counter() - start_s
            summary.tokens_per_s = progress.num_tokens / summary.time_s
            # Before anything is closed: what fails then takes nothing from the scores.
            file.publish()
            paths = {"model": str(self.given.model), "file": str(self.given.file), "output": str(self.output)}
            if self.given.json:
                print_json({**paths, **asdict(summary)})
            else:
                print(f"{summary}; wrote {self.output}")

    def _lines_of_all(
        self, engine: "Engine", number: int, texts: Sequence[Text], delivers: bool
    ) -> list[dict[str, Any]] | None:
        """The lines of a batch, which its pipeline scores, in the process that writes; None in all others.

        delivers: whether this process has its pipeline's results.

        Raises: ValueError where the model gives no numbers; PipelineError if another pipeline's do not come in time.
        """
        pipelines, index = self.pipelines, number % self.pipelines.count
        writes = delivers and pipelines.index == 0
        lines = self._lines(engine, texts, delivers) if index == pipelines.index else None
        if writes and index != pipelines.index:
            lines = pipelines.receive(index, f"scores of batch {number} from pipeline {index}")
        elif delivers and not writes and lines is not None:
            pipelines.send(lines)
        # Of scores that are none, the line of the first: whoever writes refuses them too.
        if isinstance(lines, int):
            raise ValueError(f"the scores of line {lines} {NOT_A_NUMBER}")
        return lines if writes else None

    def _lines(self, engine: "Engine", texts: Sequence[Text], delivers: bool) -> list[dict[str, Any]] | int | None:
        """Score a batch on this pipeline: its lines, or the number of the first line without numbers."""
        from penstock.engine.scoring import PerToken, token_scores

        # Of a classifier, the outputs of its head for each token and label.
        name, hook = "log_probs", token_scores(self.scoring.temperature)
        if self.model.rates is not None:
            name, hook = "ratings", PerToken(lambda output, _: {"ratings": output.float()})
        items = engine.forward(_packed(texts), hook, list, micro_batches=self.spec)
        if not delivers:
            return None
        scores = [item[name] for item in items]
        # An infinite one can be true: a token may be impossible.
        wrong = (text.line for text, values in zip(texts, scores, strict=True) if values.isnan().any())
        lines = [self.line(text, values.tolist()) for text, values in zip(texts, scores, strict=True)]
        return next(wrong, None) or lines


main = Score.main


@dataclass
class Summary:
    """Totals of all lines; `resumed_from` lines were there already, and `tokens_per_s` is that of this call.

    `num_rated` lines are those of a classifier, whose tokens have no log-probabilities; `mean_reward` is that of one
    with one label for each text. `log_prob` is None once it is unknown.
    """

    #: counted so far, like all that follows
    num_lines: int = 0
    num_scored_tokens: int = 0
    log_prob: float | None = 0.0
    perplexity: float | None = None
    num_rated: int = 0
    mean_reward: float | None = None
    resumed_from: int = 0
    time_s: float = 0.0
    tokens_per_s: float = 0.0

    def __post_init__(self) -> None:
        self._rewards: list[float] = []

    def add(self, lines: Sequence[dict[str, Any]]) -> None:
        """Count further lines."""
        for line in lines:
            log_probs = line.get("log_probs", ())
            total = _total(log_probs)
            self.log_prob = None if total is None or self.log_prob is None else self.log_prob + total
            self.num_scored_tokens += len(log_probs)
            self.num_rated += "log_probs" not in line
            if line.get("reward") is not None:
                self._rewards.append(line["reward"])
        self.num_lines += len(lines)
        self.perplexity = _perplexity(self.log_prob, self.num_scored_tokens)
        self.mean_reward = round(math.fsum(self._rewards) / len(self._rewards), 7) if self._rewards else None

    def __str__(self) -> str:
        lines = counted(self.num_lines, "line")
        if self.num_rated:
            return f"{lines} rated" + ("" if self.mean_reward is None else f", mean reward {self.mean_reward:.4f}")
        perplexity = "perplexity above 1e304" if self.num_scored_tokens else "no token had one before it"
        if self.perplexity is not None:
            perplexity = f"perplexity {self.perplexity:.4f}"
        return f"{lines}, {counted(self.num_scored_tokens, 'token')} scored, {perplexity}"


def _total(log_probs: Sequence[float | None]) -> float | None:
    known = [value for value in log_probs if value is not None]
    return round(math.fsum(known), 7) if len(known) == len(log_probs) else None


def _perplexity(total: float | None, num_tokens: int) -> float | None:
    if total is None or num_tokens == 0 or -total / num_tokens > 700:
        return None
    return float(f"{math.exp(-total / num_tokens):.8g}")


def _packed(texts: Sequence[Text]) -> "PackedBatch":
    """Pack tokens, with each scored token as the label of the one before it."""
    from penstock.data import NO_LABEL, PackedBatch

    labels = [
        [NO_LABEL] * (text.first_scored - 1) + list(text.tokens[text.first_scored :]) + [NO_LABEL] for text in texts
    ]
    return PackedBatch.from_sequences({"tokens": [list(text.tokens) for text in texts], "labels": labels})

"""`penstock score MODEL FILE.jsonl`: each token's log-probability, and each text's perplexity."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.commands import Parser, counted, print_json, refuse_to_overwrite
from penstock.cli.options import MODEL_OPTIONS, PROCESSES, add_options, options_of, parallel_options, values_of
from penstock.cli.processes.launch import WorkerCommand
from penstock.cli.progress import show_log
from penstock.cli.session import ModelArguments, ModelCommand, ModelSession, shared_arguments
from penstock.settings import DataConfig, Settings, same_as
from penstock.settings.declare import ABOVE_0, AT_LEAST_1, setting

if TYPE_CHECKING:
    from penstock.cli.scoring import ScoreJob, Summary
    from penstock.engine.folders.model_folder import ModelFolder

_WORKERS = WorkerCommand(
    "penstock.cli.score", "continues where it was stopped", ("penstock.cli.scoring", "penstock.engine.engine")
)


@dataclass(frozen=True)
class ScoreConfig(Settings, section="score"):
    """Settings of scoring."""

    max_tokens: int | None = setting(
        None, "Tokens of a microbatch, at most; left out, 2048 or the longest text.", AT_LEAST_1
    )
    temperature: float = setting(1.0, "Divides the logits.", ABOVE_0)
    text_field: str = same_as(DataConfig, "text_field")


_PARALLEL = parallel_options(("pp", "dp", "cp", "tp", *PROCESSES))
_SCORING = options_of(ScoreConfig())


@dataclass(frozen=True, kw_only=True)
class ScoreArguments(ModelArguments):
    """One call of the command; the pipelines share the texts."""

    axes = ("pp", "dp", "cp", "tp")

    file: Path
    output: Path
    scoring: ScoreConfig
    special_tokens: bool
    json: bool

    @property
    def decisive(self) -> dict[str, object]:
        """The arguments that the scores depend on, beside the model and the texts."""
        return {
            "temperature": self.scoring.temperature,
            "text_field": self.scoring.text_field,
            "special_tokens": self.special_tokens,
            "precision": self.opened["precision"],
            "reproducible": self.opened["reproducible"],
        }


def main(words: Sequence[str]) -> int:
    """Run the command; returns its exit code.

    Raises:
        ValueError, OSError: the model, the texts or the output cannot be used; nothing has been started or written.
    """
    arguments = read_arguments(words)
    show_log("WARNING")
    refuse_to_overwrite(arguments.output, otherwise="give another --output")
    return ModelCommand(_WORKERS, read_arguments, _opened, _score).run(words, arguments)


def parser() -> Parser:
    """The parser of `penstock score`."""
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
    for options in (_PARALLEL, _SCORING, MODEL_OPTIONS):
        add_options(parser, options, {"temperature": "T", "text_field": "NAME", "timeout": "SECONDS"})
    parser.add_argument("--no-native", action="store_true", help="as --native false")
    parser.add_argument(
        "--no-special-tokens", action="store_true", help="texts without the tokenizer's own, such as one to begin with"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and progress to standard error")
    return parser


def read_arguments(words: Sequence[str]) -> ScoreArguments:
    """Read the command line.

    Raises: ValueError for a mistake in it.
    """
    given = parser().parse_args(list(words))
    return ScoreArguments(
        **shared_arguments(given, _PARALLEL),
        file=given.file,
        output=given.output or given.file.with_suffix(".scores.jsonl"),
        scoring=ScoreConfig(**values_of(given, _SCORING)),
        special_tokens=not given.no_special_tokens,
        json=given.json,
    )


def _opened(arguments: ScoreArguments) -> "ModelFolder":
    """The model, which may be one that rates texts. Raises: ValueError."""
    from penstock.cli.texts import open_to_cut

    model = open_to_cut(arguments.model, arguments.parallel.pp, may_rate=True, **arguments.opened)
    if model.rates is not None and arguments.scoring.temperature != 1.0:
        raise ValueError(f"--temperature divides the logits of tokens, but {model.folder} rates {model.rates}")
    return model


def check_documents(arguments: ScoreArguments) -> "ScoreJob":
    """Read the model's settings and the texts.

    Raises: ValueError for input that cannot be scored.
    """
    from penstock.cli.scoring import MICROBATCH_TOKENS, ScoreJob
    from penstock.cli.texts import plainly, read_texts

    model = _opened(arguments)
    model = model if arguments.special_tokens else plainly(model)
    texts = read_texts(arguments.file, model, arguments.scoring.text_field)
    longest = max(texts, key=lambda text: len(text.tokens))
    if arguments.scoring.max_tokens is not None and len(longest.tokens) > arguments.scoring.max_tokens:
        raise ValueError(
            f"{arguments.file}, line {longest.line}: has {len(longest.tokens)} tokens, more than --max-tokens "
            f"{arguments.scoring.max_tokens}; no text is cut, so give at least that"
        )
    max_tokens = arguments.scoring.max_tokens or max(MICROBATCH_TOKENS, len(longest.tokens))
    return ScoreJob(model, texts, max_tokens, arguments.parallel.cp)


def _score(session: ModelSession[ScoreArguments]) -> None:
    from penstock.cli.scoring import ScoreFile, Scoring

    arguments = session.arguments
    job = session.together("texts", lambda: check_documents(arguments))
    digest = _digest(job.texts)
    session.refuse_differing("scoring", {**arguments.decisive, "texts": digest, "max_tokens": job.max_tokens})
    with session.open(job.model) as (engine, version):
        decisive = [str(job.model.folder.resolve()), version, digest, job.max_tokens, arguments.decisive]
        ends = list(accumulate(map(len, job.batches)))
        # Ranks that share the last stage have the same results; one of them delivers.
        delivers = engine.pipeline.gives_results and (engine.grid.tp_rank, engine.grid.cp_rank) == (0, 0)
        writes = delivers and session.pipelines.index == 0
        file = session.together(
            "file", lambda: ScoreFile(arguments.output, _digest(decisive), ends) if writes else None
        )
        num_lines = session.agree("lines", {"num": 0 if file is None else file.num_lines})
        first = max(lines["num"] for lines in num_lines)
        scoring = Scoring(engine, job, session.pipelines, delivers, file, first)
        summary = scoring.run(arguments.scoring.temperature, sys.stderr if arguments.json else sys.stdout)
        # The store may belong to a process that has already finished its own work.
        session.agree("end", {})
        if file is not None and summary is not None:
            # Before anything is closed: what fails then takes nothing from the scores.
            file.publish()
            _show(summary, arguments)


def _digest(value: object) -> str:
    text = json.dumps(value, default=lambda text: [text.line, text.id, list(text.tokens), text.num_prompt_tokens])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _show(summary: "Summary", arguments: ScoreArguments) -> None:
    paths = {"model": str(arguments.model), "file": str(arguments.file), "output": str(arguments.output)}
    if arguments.json:
        print_json({**paths, **summary.to_dict()})
        return
    if summary.num_rated:
        mean = "" if summary.mean_reward is None else f", mean reward {summary.mean_reward:.4f}"
        print(f"{counted(summary.num_lines, 'line')} rated{mean}; wrote {arguments.output}")
        return
    if summary.perplexity is not None:
        perplexity = f"perplexity {summary.perplexity:.4f}"
    else:
        perplexity = "perplexity above 1e304" if summary.num_scored_tokens else "no token had one before it"
    print(
        f"{counted(summary.num_lines, 'line')}, {counted(summary.num_scored_tokens, 'token')} scored, {perplexity}; "
        f"wrote {arguments.output}"
    )

"""The command line of `penstock score`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.commands import Parser


@dataclass(frozen=True)
class ScoreArguments:
    """One call of the command; `max_tokens` and `num_threads` are those of a microbatch and of a rank."""

    model: Path
    file: Path
    output: Path
    pp: int
    dp: int
    cp: int
    tp: int
    max_tokens: int | None
    temperature: float
    text_field: str
    device: str
    num_threads: int
    timeout_s: float
    native: bool
    json: bool

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def decisive(self) -> dict[str, object]:
        """What the scores depend on, beside the model and the texts."""
        return {"temperature": self.temperature, "text_field": self.text_field}


def _parser() -> Parser:
    parser = Parser(
        "penstock score",
        """Write each token's log-probability, in nats, and each text's perplexity. MODEL is the folder of a run,
whose newest checkpoint is taken, or of a Hugging Face model. A line of FILE is {"text": ...}, or {"tokens": [...]}
with token ids, or {"prompt": ..., "completion": ...}, each a text or token ids, of which the completion is scored.
An "id" is carried along. A call that was stopped is continued by the same command; no file is ever overwritten.""",
        examples=(
            "penstock score runs/demo texts.jsonl                 writes texts.scores.jsonl",
            "penstock score runs/demo texts.jsonl --pp 2 --json   two stages, and a summary as JSON",
            "penstock score runs/demo texts.jsonl --dp 4          four models, each with its part of the texts",
        ),
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="the folder of a run, or of a Hugging Face model")
    parser.add_argument("file", type=Path, metavar="FILE.jsonl", help="the texts, a JSON object a line")
    parser.add_argument("--output", type=Path, metavar="OUT.jsonl", help="default: FILE.scores.jsonl beside FILE")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="stages, each a process here (default 1)")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="pipelines that share the texts (default 1)")
    parser.add_argument("--cp", type=int, default=1, metavar="N", help="ranks that share each text (default 1)")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each stage (default 1)")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of a microbatch (default 2048, or the longest text)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="divides the logits (default 1)")
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help='where a line has its text (default "text")'
    )
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of a stage (default 1)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for a silent peer (default 600)"
    )
    parser.add_argument(
        "--no-native", action="store_true", help="run a Hugging Face model by transformers' own layers, of any family"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON, and progress to standard error")
    return parser


def read_arguments(words: Sequence[str]) -> ScoreArguments:
    """Read the command line.

    Raises: ValueError for a mistake in it.
    """
    given = _parser().parse_args(list(words))
    for name in ("pp", "dp", "cp", "tp", "max_tokens", "threads", "temperature", "timeout"):
        value = getattr(given, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
    return ScoreArguments(
        model=given.model,
        file=given.file,
        output=given.output or given.file.with_suffix(".scores.jsonl"),
        pp=given.pp,
        dp=given.dp,
        cp=given.cp,
        tp=given.tp,
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        text_field=given.text_field,
        device=given.device,
        num_threads=given.threads,
        timeout_s=given.timeout,
        native=not given.no_native,
        json=given.json,
    )

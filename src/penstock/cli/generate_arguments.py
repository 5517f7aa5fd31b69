"""The command line of `penstock generate`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.cli.commands import Parser

STANDARD_INPUT = "PENSTOCK_STANDARD_INPUT"
"""The environment variable that names, for workers, the file with the command's standard input."""


@dataclass(frozen=True)
class GenerateArguments:
    """One call of the command.

    prompts: from the command line; file: JSON lines; with neither, the prompt is standard input. sampling: settings of
    `SamplingParams` by name, end tokens excepted. ring: settings of `GenerateOptions` by name. end_tokens: None for
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
    pp: int
    tp: int
    device: str
    num_threads: int
    timeout_s: float
    json: bool

    @property
    def world_size(self) -> int:
        return self.pp * self.tp


def _parser() -> Parser:
    parser = Parser(
        "penstock generate",
        """Continue prompts with the model in a folder: that of a run, whose newest checkpoint is taken, or of a Hugging
Face model. Prompts are given on the command line, or as JSON lines ({"prompt": ...} or {"tokens": [...]}, with an "id"
that is carried along), or one comes from standard input. Answers to a file are kept as soon as they have ended: a call
that was stopped goes on when it is given again. A token depends on the seed, its prompt and its place alone:
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
    sampling.add_argument("--max-new-tokens", type=int, default=64, metavar="N", help="tokens of an answer, at most")
    sampling.add_argument("--min-new-tokens", type=int, default=0, metavar="N", help="no end token before so many")
    sampling.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0 takes the likeliest token")
    sampling.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share P")
    sampling.add_argument("--chained", action="store_true", help="--top-p of what --top-k has left")
    sampling.add_argument("--seed", type=int, default=0, metavar="N")
    sampling.add_argument("--samples", type=int, default=1, metavar="N", help="answers to each prompt")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="ends an answer that holds it")
    sampling.add_argument("--end-token", type=int, action="append", metavar="ID", help="default: the model's own")
    sampling.add_argument("--ignore-end", action="store_true", help="no end token but those given ends an answer")
    sampling.add_argument("--raw-log-probs", action="store_true", help="those of the model itself as well")
    ring = parser.add_argument_group("how it runs")
    ring.add_argument("--pp", type=int, default=1, metavar="N", help="stages, each a process here (default 1)")
    ring.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each stage (default 1)")
    ring.add_argument("--slots", type=int, metavar="N", help="groups of answers under way (default: as many as stages)")
    ring.add_argument("--rows", type=int, metavar="N", help="answers of a slot (default: as many as needed, to 16)")
    ring.add_argument("--prefill-tokens", type=int, default=512, metavar="N", help="of prompts, a slot and round")
    ring.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    ring.add_argument("--threads", type=int, default=1, metavar="N", help="CPU threads of a stage (default 1)")
    ring.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a silent peer (default 600)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and progress to standard error")
    return parser


def read_arguments(words: Sequence[str]) -> GenerateArguments:
    """Read the command line.

    Raises: ValueError for a mistake in it.
    """
    given = _parser().parse_args(list(words))
    for name in ("pp", "tp", "threads", "timeout", "slots", "rows", "prefill_tokens"):
        value = getattr(given, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be more than 0")
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
        sampling={
            "max_new_tokens": given.max_new_tokens,
            "min_new_tokens": given.min_new_tokens,
            "temperature": given.temperature,
            "top_k": given.top_k,
            "top_p": given.top_p,
            "chained": given.chained,
            "seed": given.seed,
            "num_samples": given.samples,
            "raw_log_probs": given.raw_log_probs,
        },
        end_tokens=tuple(given.end_token or ()) if given.ignore_end or given.end_token else None,
        stop=tuple(given.stop),
        ring={"num_slots": given.slots, "rows_per_slot": given.rows, "prefill_tokens": given.prefill_tokens},
        pp=given.pp,
        tp=given.tp,
        device=given.device,
        num_threads=given.threads,
        timeout_s=given.timeout,
        json=given.json,
    )

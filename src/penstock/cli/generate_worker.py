"""One worker of `penstock generate`: its stage of the model; the first stage's reports the answers."""

import hashlib
import json
import os
import sys
from dataclasses import asdict, replace
from pathlib import Path

from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from penstock.cli.generate_arguments import STANDARD_INPUT, GenerateArguments
from penstock.cli.generate_output import AnswerReporter, AnswersFile, GenerateJob
from penstock.cli.launch import Group
from penstock.cli.prompts import prompts_of_texts, read_prompts
from penstock.cli.together import choose_device, initialise, refuse_differing, together, work_together
from penstock.engine.engine import Engine
from penstock.engine.generator import GenerateOptions, check_prompts
from penstock.engine.saved_model import open_model
from penstock.model import Limits
from penstock.parallel.host import broadcast_value
from penstock.runtime import Watchdog
from penstock.settings import ParallelConfig, SamplingParams


def check(arguments: GenerateArguments) -> GenerateJob:
    """Read model settings and prompts.

    Raises: ValueError for what can not be generated.
    """
    model = open_model(arguments.model)
    if arguments.pp > model.num_units:
        raise ValueError(
            f"--pp {arguments.pp} asks for {arguments.pp} stages, but {model.folder} has {model.num_units} units "
            f"to cut from, so at most {model.num_units} are possible"
        )
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
    return GenerateJob(model, prompts, params, GenerateOptions(**arguments.ring))


def _standard_input() -> str:
    path = os.environ.get(STANDARD_INPUT)
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    if sys.stdin.isatty():
        print("penstock: type the prompt, and Ctrl-D to end it", file=sys.stderr)
    return sys.stdin.read()


def _answers_file(arguments: GenerateArguments, job: GenerateJob, version: str) -> AnswersFile | None:
    """Where the answers go, with those that a stopped call to the same end has left there.

    Raises: ValueError if the file can not be written, or what is left answers something else.
    """
    if arguments.output is None:
        return None
    given = [[list(prompt.tokens), prompt.line, prompt.id] for prompt in job.prompts]
    what = [str(job.model.folder.resolve()), version, given, asdict(job.params), arguments.stop]
    digest = hashlib.blake2b(json.dumps(what).encode(), digest_size=8).hexdigest()
    return AnswersFile(arguments.output, digest, job.params.num_samples, arguments.fresh)


def run_worker(arguments: GenerateArguments, group: Group) -> int:
    """Generate as one process of `group`; returns the exit code."""
    return work_together(
        group, arguments.num_threads, arguments.timeout_s, lambda store: _generate(arguments, group, store)
    )


def _generate(arguments: GenerateArguments, group: Group, store: Store) -> None:
    job = together(store, group, "prompts", lambda: check(arguments))
    refuse_differing(store, group, "answers", {**arguments.sampling, "prompts": [list(p.tokens) for p in job.prompts]})
    device = choose_device(store, group, arguments.device)
    initialise(store, group, device, arguments.timeout_s)
    parallel = ParallelConfig(
        pp=arguments.pp,
        tp=arguments.tp,
        device=device,
        num_threads=arguments.num_threads,
        timeout_s=arguments.timeout_s,
    )
    engine = Engine(*job.model.arguments(parallel))
    version = job.model.load(engine)
    file = together(store, group, "output", lambda: _answers_file(arguments, job, version) if group.rank == 0 else None)
    kept: list[int] = broadcast_value(file and file.kept, 0, engine.grid.control) or []
    reporter = None
    if engine.pipeline.holds_first_stage:
        # All ranks that share the first stage hear of every token, for what they hear decides what ends; one reports.
        reporter = AnswerReporter(arguments, job, file, silent=engine.grid.tp_rank > 0)
    watchdog = Watchdog.of_run(engine.recorder, arguments.timeout_s, engine.grid.control, engine.grid.pp_ranks)
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

"""`penstock bench`: the source of the documentation's figures; every ratio is taken in one run."""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import plan_published as bench_plan
from benchmarks.ranks import RankFailed
from penstock import schedule
from penstock.cli.commands import Parser, print_json, print_table
from penstock.schedule import builders
from penstock.settings import Precision, Quantize

DESCRIPTION = """Measure Penstock on this machine, against its peers where they exist. Each side runs several times in
turn with the others, in one run; medians and ranges are printed."""


def main(arguments: list[str]) -> int:
    """Run one benchmark, or all of them.

    Raises: ValueError for a mistake in the arguments.
    """
    given = parser().parse_args(arguments)
    try:
        result = given.run(given)
    except RankFailed as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    if given.json:
        print_json(result)
    else:
        given.show(result)
    return 0


def parser() -> Parser:
    """The parser of `penstock bench`."""
    parser = Parser("penstock bench", DESCRIPTION, examples=["penstock bench train", "penstock bench generate --json"])
    benchmarks = parser.add_subparsers(dest="benchmark", required=True, metavar="BENCHMARK", prog="penstock bench")

    _add_training(benchmarks)
    _add_slow_links(benchmarks)
    _add_models(benchmarks)
    plan = _add(benchmarks, "plan", bench_plan.run, bench_plan.WHAT)
    bench_plan.add_arguments(plan)
    plan.set_defaults(show=bench_plan.show)
    _add(
        benchmarks,
        "all",
        _all,
        "all of the above but overlap, reduction, ring, reproducible, serve and plan, with their defaults",
    )
    return parser


def _add_training(benchmarks: Any) -> None:
    schedules = _add(benchmarks, "schedules", _schedules, "measured over simulated time of schedules")
    schedules.add_argument("--emulate", action="store_true", help="stages whose compute sleeps (the only kind so far)")
    schedules.add_argument("--ranks", type=int, nargs="+", default=[8], metavar="N", help="ranks of the pipeline")
    schedules.add_argument(
        "--microbatches", type=int, nargs="+", default=[32], metavar="N", help="microbatches of a step"
    )
    schedules.add_argument(
        "--schedules",
        nargs="+",
        default=["afab", "1f1b"],
        metavar="NAME",
        help="names, or all for every one that trains",
    )
    schedules.add_argument("--forward-ms", type=float, default=20.0, help="F of a rank's stages together")
    schedules.add_argument("--backward-ms", type=float, default=40.0, help="B; I and W take half of it each")
    schedules.add_argument("--steps", type=int, default=5, help="steps of each engine, in turn")
    schedules.set_defaults(show=_show_schedules)

    train = _add(benchmarks, "train", _train, "tokens per second of training, the same modules under each engine")
    train.add_argument("--against", choices=["torch"], default="torch", help="torch.distributed.pipelining")
    train.add_argument(
        "--schedules", nargs="+", default=["1f1b", "zb-h1", "zb-v"], metavar="NAME", help="run with Penstock's own cut"
    )
    train.add_argument(
        "--products", choices=["torch", "fastest"], default="torch", help="matrix products, on all sides"
    )
    train.add_argument(
        "--precision", choices=["fp32", "bf16-autocast"], default="fp32", help="of forwards, on all sides"
    )
    train.add_argument("--compile", action="store_true", help="compile each layer with torch.compile, on all sides")
    train.add_argument("--layers", type=int, default=8, help="layers of the model")
    train.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    train.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    train.add_argument("--steps", type=int, default=3, help="steps of each side, in turn")

    overhead = _add(benchmarks, "overhead", _overhead, "cost of an action beyond its compute")
    overhead.add_argument("--schedule", default="1f1b", help="a name that `schedule list` prints")
    overhead.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline")
    overhead.add_argument("--microbatches", type=int, default=200, help="microbatches of a step")
    overhead.add_argument("--steps", type=int, default=20, help="steps of a run")

    failures = _add(benchmarks, "failures", _failures, "time until a failure on one rank is raised on all of them")
    failures.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline")
    failures.add_argument("--failures", type=int, default=20, help="failed steps of each layout")

    split = _add(benchmarks, "split", _split, "extra cost of a backward that is split into I and W")
    split.add_argument("--products", choices=["torch", "fastest"], default="torch", help="matrix products")
    split.add_argument("--runs", type=int, default=15, help="pairs of backwards, whole and split in turn")

    _add(benchmarks, "scale", _scale, "time and memory to build, lower, prove and simulate up to two million actions")


def _add_slow_links(benchmarks: Any) -> None:
    overlap = _add(
        benchmarks, "overlap", _overlap, "share of all-to-all that the combined schedule hides on a slow link"
    )
    overlap.add_argument("--layers", type=int, default=3, help="layers of the model")
    overlap.add_argument("--hidden-size", type=int, default=768, help="width of the model")
    overlap.add_argument("--expert-size", type=int, default=768, help="width inside an expert")
    overlap.add_argument("--tokens", type=int, default=512, help="of a microbatch")
    overlap.add_argument("--microbatches", type=int, default=24, help="microbatches of a step")
    overlap.add_argument(
        "--emulate", type=float, metavar="GFLOPS", help="matrix products sleep as long as they would take at this speed"
    )
    overlap.add_argument("--rounds", type=int, default=3, help="steps of each side, in turn")
    overlap.add_argument("--mbit", type=float, default=None, help="the link's rate (default: plain 1F1B waits 34%%)")

    reduction = _add(
        benchmarks, "reduction", _reduction, "share of gradient traffic that dp = 2 x pp = 2 hides on a slow link"
    )
    reduction.add_argument("--emulate", type=float, default=100.0, metavar="GFLOPS", help="speed of matrix products")
    reduction.add_argument("--zero", action="store_true", help="shard the optimizer's step (ZeRO-1)")
    reduction.add_argument("--rounds", type=int, default=3, help="steps that are measured")
    reduction.add_argument("--mbit", type=float, default=1000.0, help="the link's rate")

    ring = _add(benchmarks, "ring", _ring, "share of the ring's keys and values that cp = 2 hides on a slow link")
    ring.add_argument("--tokens", type=int, default=4096, help="of a sequence")
    ring.add_argument("--rounds", type=int, default=3, help="steps that are measured")
    ring.add_argument("--mbit", type=float, default=1000.0, help="the link's rate")


def _add_models(benchmarks: Any) -> None:
    balance = _add(benchmarks, "balance", _balance, "how evenly experts are used, and their loss beside one MLP's")
    balance.add_argument("--steps", type=int, default=200, help="steps of a run")
    balance.add_argument("--seed", type=int, default=0, help="decides weights and data")

    generate = _add(benchmarks, "generate", _generate, "tokens per second of generation, and how busy stages are")
    generate.add_argument("--layers", type=int, default=8, help="layers of the model")
    generate.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    generate.add_argument("--intermediate-size", type=int, default=1408, help="width of its MLPs")
    generate.add_argument("--kv-heads", type=int, help="key and value heads (default: as many as query heads)")
    generate.add_argument("--vocab-size", type=int, default=4096, help="tokens of its vocabulary")
    generate.add_argument("--prompts", type=int, default=8, help="number of prompts")
    generate.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    generate.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parts = [*_GENERATE_PARTS, "gpu"]
    said = f"what is measured: {', '.join(parts)} (default: all but gpu)"
    generate.add_argument("--parts", nargs="+", choices=parts, default=_GENERATE_PARTS, metavar="PART", help=said)
    peers = ("transformers", "ctranslate2")
    generate.add_argument(
        "--against", nargs="+", choices=peers, default=peers[:1], metavar="PEER", help=" or ".join(peers)
    )
    generate.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="of weights and activations")
    generate.add_argument(
        "--quantize", choices=[*Quantize], default="none", help="Penstock's weights; CTranslate2 then has int8"
    )
    generate.add_argument("--rounds", type=int, default=3, help="of each side, in turn")

    reproducible = _add(
        benchmarks, "reproducible", _reproducible, "what reproducible tokens cost, and that they are so"
    )
    reproducible.add_argument("--layers", type=int, default=6, help="layers of the model")
    reproducible.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    reproducible.add_argument("--rounds", type=int, default=4, help="of each side, in turn")

    serve = _add(benchmarks, "serve", _serve, "tokens per second of a server over generate, and its first tokens")
    serve.add_argument("--layers", type=int, default=8, help="layers of the model")
    serve.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    serve.add_argument("--clients", type=int, default=64, help="clients at the same time")
    serve.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    serve.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    serve.add_argument("--ranks", type=int, default=2, help="ranks of the pipeline")
    serve.add_argument("--rounds", type=int, default=3, help="of each side, in turn")


def _add(
    benchmarks: Any, name: str, run: Callable[[argparse.Namespace], Any], what: str, example: str = ""
) -> argparse.ArgumentParser:
    parser = benchmarks.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}.", examples=[f"penstock bench {name}{example}"]
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run, show=_show)
    return parser


def _schedules(given: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.schedules import Emulation, compare

    names = _names(given.schedules)
    num_rows = len(names) * len(given.ranks) * len(given.microbatches)
    times = (given.forward_ms * 1e-3, given.backward_ms * 1e-3, given.steps)
    found = []
    for ranks in given.ranks:
        for row in compare(names, [Emulation(ranks, microbatches, *times) for microbatches in given.microbatches]):
            found.append(row)
            what = f"{row['schedule']}, {row['ranks']} ranks, {row['microbatches']} microbatches"
            _progress(f"{len(found)}/{num_rows} {what}: {row['penstock']['ratio']:.3f}")
    return found


def _names(given: list[str]) -> list[str]:
    """The requested schedules; `all` stands for every one that trains.

    Raises: ValueError for an unknown name, or that of a schedule without backwards.
    """
    known = [name for name in schedule.names() if builders.trains(name)]
    if given == ["all"]:
        return known
    for name in given:
        schedule.describe(name)
        if name not in known:
            raise ValueError(f"schedule {name} has no backward; possible are {', '.join(known)}")
    return given


def _show_schedules(rows: list[dict[str, Any]]) -> None:
    from benchmarks.schedules import cells

    print_table(cells(rows))


def _train(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.train import Training, compare
    from penstock.settings import Precision

    training = Training(
        num_layers=given.layers,
        hidden_size=given.hidden_size,
        num_microbatches=given.microbatches,
        num_steps=given.steps,
        products=given.products,
        precision=Precision(given.precision),
        compile=given.compile,
        names=tuple(given.schedules),
    )
    _progress(f"{dataclasses.asdict(training)}")
    return compare(training)


def _overhead(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.overhead import measure

    return measure(given.schedule, given.ranks, given.microbatches, given.steps)


def _failures(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.failures import measure

    return measure(given.ranks, given.failures)


def _split(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.overhead import measure_split
    from benchmarks.train import Training

    return measure_split(Training(products=given.products), given.runs)


def _scale(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.scale import measure

    return measure()


def _overlap(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.overlap import ModelSize, measure

    size = ModelSize(
        num_layers=given.layers,
        hidden_size=given.hidden_size,
        expert_size=given.expert_size,
        microbatch_tokens=given.tokens,
        num_microbatches=given.microbatches,
        num_rounds=given.rounds,
        rate=None if given.mbit is None else given.mbit * 1e6,
        emulated_flops=None if given.emulate is None else given.emulate * 1e9,
    )
    return measure(size, _progress)


def _reduction(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.overlap import measure_hidden, reduction

    return measure_hidden(reduction(given.mbit, given.emulate, given.rounds, given.zero), _progress)


def _ring(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.overlap import measure_hidden, ring

    return measure_hidden(ring(given.mbit, given.tokens, given.rounds), _progress)


def _balance(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.balance import Learning, measure

    return measure(Learning(num_steps=given.steps, seed=given.seed), _progress)


_GENERATE_PARTS = ("peers", "refill", "emulated")


def _generate(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.generate import CTRANSLATE2, measure
    from benchmarks.generate_gpu import LLAMA_1B, check_gpu, on_gpu
    from benchmarks.generation_task import Generation
    from benchmarks.peers import check_ctranslate2

    gpu = "gpu" in given.parts
    if gpu:
        check_gpu()
    generation = Generation(
        num_layers=given.layers,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        vocab_size=given.vocab_size,
        num_kv_heads=given.kv_heads,
        num_prompts=given.prompts,
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.new_tokens,
        num_rounds=given.rounds,
        precision=Precision(given.precision),
        quantize=Quantize(given.quantize),
    )
    if CTRANSLATE2 in given.against:
        check_ctranslate2(generation.compute_type)
    _progress(generation.described)
    found = measure(generation, given.parts, tuple(given.against))
    return found | {"on a GPU": on_gpu(dataclasses.replace(LLAMA_1B, num_rounds=given.rounds))} if gpu else found


def _reproducible(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.reproducible import Reproducing, measure

    asked = Reproducing(num_layers=given.layers, hidden_size=given.hidden_size, num_rounds=given.rounds)
    _progress(f"{dataclasses.asdict(asked)}")
    return measure(asked, _progress)


def _serve(given: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.generation_task import Generation
    from benchmarks.serve import Serving, measure

    generation = Generation(
        num_layers=given.layers,
        hidden_size=given.hidden_size,
        num_prompts=given.clients,
        prompt_tokens=given.prompt_tokens,
        new_tokens=given.new_tokens,
        num_rounds=given.rounds,
    )
    serving = Serving(generation, given.ranks, rows_per_slot=-(-given.clients // given.ranks))
    _progress(f"{dataclasses.asdict(serving)}")
    return measure(serving)


def _all(given: argparse.Namespace) -> dict[str, Any]:
    names = ("schedules", "train", "overhead", "failures", "split", "scale", "balance", "generate")
    runs = [parser().parse_args([name]) for name in names]
    return {one.benchmark: one.run(one) for one in runs}


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(result: Any, indent: str = "") -> None:
    """Print names and numbers, a line each."""
    if isinstance(result, list):
        for found in result:
            _show(found, indent)
            print()
        return
    for name, value in result.items():
        if isinstance(value, dict) and set(value) == {"median", "range"}:
            print(f"{indent}{name}: {_text(value['median'])} ({_text(value['range'])})")
        elif isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            print(f"{indent}{name}:")
            _show(value, indent + "  ")
        else:
            print(f"{indent}{name}: {_text(value)}")


def _text(value: Any) -> str:
    if isinstance(value, list):
        floats = any(isinstance(v, float) for v in value)
        return (" to " if floats else " ").join(map(_text, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)

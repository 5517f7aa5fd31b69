"""`penstock plan`: the fastest layouts and schedules for a model on a cluster, found by simulating their programs."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock import planner
from penstock.cli.options import Parser, add_json, add_output
from penstock.cli.output import print_json, print_table, refuse_to_overwrite, size_in_words, waiting, write_text
from penstock.engine.folders.run_check import with_pretrained
from penstock.io.files import toml_text
from penstock.settings import ModelConfig, Precision, RunConfig
from penstock.settings.declare import ConfigError, plain
from penstock.settings.run import Values, check_sections, from_values, read_values


def main(words: Sequence[str]) -> int:
    given = parser().parse_args(list(words))
    if given.output is not None:
        refuse_to_overwrite(given.output, force=given.force)
    values, workload = _workload(given)
    cluster = _cluster(given, given.devices)
    constants = _calibrated(given) if given.calibrate else planner.Constants()
    if given.action_us is not None:
        constants = replace(constants, action_s=given.action_us * 1e-6)
    if given.compute is not None:
        constants = replace(constants, compute=given.compute)
    with waiting("planning", sys.stderr):
        found = planner.plan(workload, cluster, constants, effort=given.effort)
    if given.json:
        print_json(as_dict(found))
    else:
        _show(found)
    if given.explain is not None and not given.json:
        first, second = (_numbered(found, number, "--explain") for number in given.explain)
        print("\n" + "\n".join(planner.comparison(first, second)))
    if given.output is not None:
        _write(given, values, found)
    return 0


def parser() -> Parser:
    parser = Parser(
        "penstock plan",
        """Find the fastest layouts, schedules, microbatches and recomputation for a model on a cluster. Candidates are
pruned by memory and bounds, and the programs of the rest are simulated. Equal arguments give equal plans.""",
        examples=(
            "penstock plan run.toml --cluster h100 --devices 64 --output planned.toml",
            "penstock plan --model llama3-70b --length 8192 --cluster h200 --devices 512",
            "penstock plan run.toml --cluster our-cluster.toml",
        ),
    )
    parser.add_argument("run", nargs="?", metavar="RUN.toml", help="the model and the batch are those of this run")
    parser.add_argument("--model", metavar="NAME", help="a published model, or a Hugging Face model's folder, instead")
    parser.add_argument("--sequences", type=int, default=1024, metavar="N", help="of a step, with --model")
    parser.add_argument("--length", type=int, default=8192, metavar="TOKENS", help="of a sequence, with --model")
    parser.add_argument("--precision", default="bf16", help="of products, with --model (default bf16)")
    parser.add_argument("--label-share", type=float, metavar="SHARE", help="of tokens, with --model (default 1)")
    parser.add_argument("--cluster", required=True, metavar="HOST|FILE", help="a known host, or a cluster's TOML file")
    parser.add_argument("--devices", type=int, metavar="N", help="(default: one host, or the file's number)")
    parser.add_argument("--compute", type=float, metavar="SHARE", help="share of the peak that products reach")
    parser.add_argument("--action-us", type=float, metavar="TIME", help="microseconds that every action takes besides")
    parser.add_argument(
        "--calibrate",
        action="append",
        default=[],
        type=Path,
        metavar="RUN",
        help="fit both to the step times of a run's folder, trained on such devices; several times for several runs",
    )
    parser.add_argument(
        "--effort", type=float, default=1.0, metavar="F", help="simulate F times as much as usual (default 1)"
    )
    parser.add_argument("--explain", type=int, nargs=2, metavar=("A", "B"), help="compare two of the plan, by number")
    add_output(parser, "write the settings of the first for penstock train")
    parser.add_argument("--choose", type=int, default=1, metavar="N", help="write the N-th of the plan instead")
    add_json(parser)
    return parser


def _workload(given: argparse.Namespace) -> tuple[Values, planner.Workload]:
    """The settings of the run's file, and what is to be trained."""
    if (given.run is None) == (given.model is None):
        raise ValueError("penstock plan takes either a run's TOML file or --model NAME, a published model or a folder")
    if given.sequences < 1 or given.length < 1:
        raise ValueError("--sequences and --length must be at least 1")
    if given.run is not None and given.label_share is not None:
        raise ValueError("--label-share goes with --model; the share of a run is data.label_share in its file")
    given.label_share = 1.0 if given.label_share is None else given.label_share
    if not 0 < given.label_share <= 1:
        raise ValueError(f"--label-share {given.label_share:g} is no share of the tokens; above 0 up to 1 is possible")
    if given.run is not None:
        values = read_values(given.run)
    elif Path(given.model).is_dir():
        values = _settings_of_model(given, {"model.pretrained": given.model})
    else:
        shape, values = planner.published_model(given.model), {}
        if given.output is not None:
            try:
                values = _settings_of_model(given, shape.settings())
            except ValueError as error:
                raise ValueError(f"--output cannot write a run of {given.model}: {error}") from None
        share = given.label_share
        return values, planner.Workload(shape, given.length, given.sequences, given.precision, label_share=share)
    config = from_values(values)
    if config.model.pretrained is None:
        # All that the plan does not choose must go together before it is made.
        ours = {name: value for name, value in values.items() if not name.startswith(("parallel.", "schedule."))}
        check_sections(from_values(ours | {"train.num_microbatches": 1}))
    return values, _workload_of(with_pretrained(config))


def _settings_of_model(given: argparse.Namespace, model: Mapping[str, Any]) -> Values:
    """The settings of a run of a model that was named. Raises: ValueError for a precision that no run has."""
    values = {
        "output": f"runs/{Path(given.model).name}",
        **model,
        "model.max_length": max(given.length, ModelConfig().max_length),
        "data.sequence_length": given.length,
        "data.num_sequences": given.sequences,
        "data.label_share": given.label_share,
        "train.precision": given.precision,
    }
    from_values({**values, "train.num_microbatches": 1})
    return values


def _workload_of(config: RunConfig) -> planner.Workload:
    data, vocab_size = config.data, config.model.vocab_size
    if vocab_size is None:
        # A tokenizer decides it.
        from penstock.data.tokenizer import load_tokenizer

        vocab_size = load_tokenizer(data.tokenizer, data.end_token).vocab_size
    precision = config.train.precision or Precision.FP32
    autocast = precision is Precision.BF16_AUTOCAST
    dtype = "bf16" if autocast else str(precision)
    shape = planner.ModelShape.of(config.model.whole(vocab_size))
    return planner.Workload(shape, data.sequence_length, data.num_sequences, dtype, autocast, data.label_share)


def _calibrated(given: argparse.Namespace) -> planner.Constants:
    """The constants of the cost model, fitted to the runs that were named."""
    # Only now, since it loads PyTorch.
    from penstock.engine.folders.runs import METRICS_FILE, RUN_FILE, read_metrics

    runs = []
    for folder in given.calibrate:
        config = from_values(read_values(folder / RUN_FILE))
        times = [line.get("step_time_s") for line in read_metrics(folder / METRICS_FILE)]
        try:
            seconds = planner.median_step_s([time for time in times if isinstance(time, float) and time > 0])
            runs.append(planner.MeasuredRun(_workload_of(config), planner.candidate_of(config), seconds))
        except ValueError as error:
            raise ValueError(f"{folder} cannot calibrate a plan: {error}") from None
    constants = planner.calibrate(runs, lambda devices: _cluster(given, devices))
    print(f"calibrated: --compute {constants.compute:.4g} --action-us {1e6 * constants.action_s:.4g}", file=sys.stderr)
    for sentence in constants.at_bounds:
        print(f"{sentence}; the plan is to be trusted less", file=sys.stderr)
    return constants


def _cluster(given: argparse.Namespace, devices: int | None) -> planner.Cluster:
    if devices is not None and devices < 1:
        raise ValueError(f"--devices must be at least 1, not {devices}")
    if given.cluster.endswith(".toml"):
        return planner.Cluster.read(given.cluster, devices)
    return planner.Cluster.named(given.cluster, devices)


def _write(given: argparse.Namespace, values: Values, found: planner.Plan) -> None:
    """Write the run's settings with those of the plan's first layout, or the chosen one."""
    replaced = ("schedule.", "train.max_microbatch_tokens")
    changed = {name: value for name, value in values.items() if not name.startswith(replaced)}
    changed |= planner.settings_of(_numbered(found, given.choose, "--choose").candidate)
    try:
        from_values(changed)
    except ConfigError as error:
        raise ValueError(f"{given.run or given.model} cannot train so: {error}") from None
    sections: dict[str, Any] = {}
    for name, value in changed.items():
        section, _, key = name.rpartition(".")
        (sections.setdefault(section, {}) if section else sections)[key] = plain(value)
    plain_first = sorted(sections.items(), key=lambda item: isinstance(item[1], dict))
    write_text(given.output, toml_text(dict(plain_first)), force=given.force)


def _numbered(found: planner.Plan, number: int, option: str) -> planner.Estimate:
    if not 1 <= number <= len(found.best):
        raise ValueError(f"{option} takes numbers from 1 to {len(found.best)}, not {number}")
    return found.best[number - 1]


def as_dict(found: planner.Plan) -> dict[str, Any]:
    figures = ("step_s", "tokens_s_device", "mfu", "peak_bytes", "bubble", "parts_s")
    return {
        "devices": found.cluster.num_devices,
        "cluster": found.cluster.name,
        "constants": {name: getattr(found.constants, name) for name in ("compute", "action_s", "at_bounds")},
        "best": [
            {"layout": str(one.candidate), "settings": planner.settings_of(one.candidate)}
            | {name: getattr(one, name) for name in figures}
            for one in found.best
        ],
        "num_simulated": len(found.tried),
        "left_out": found.left_out,
        "known": dict(found.known),
    }


def _show(found: planner.Plan) -> None:
    cells = [["", "layout", "step", "tokens/s/device", "MFU", "fullest rank", "bubble", "exposed messages"]]
    for number, one in enumerate(found.best, start=1):
        waits = [
            f"{kind} {one.parts_s[kind] / one.step_s:.1%}" for kind in ("tp", "cp", "ep", "dp") if kind in one.parts_s
        ]
        figures = [f"{one.step_s:.4g} s", f"{one.tokens_s_device:,.0f}", f"{one.mfu:.1%}"]
        fullest, bubble = size_in_words(one.peak_bytes), f"{one.bubble:.1%}"
        cells.append([str(number), str(one.candidate), *figures, fullest, bubble, ", ".join(waits) or "-"])
    print_table(cells)
    print(f"\n{len(found.tried)} simulated; left out:")
    for reason, number in found.left_out.items():
        print(f"  {number:6d} {reason}")
    print("well-known layouts:")
    for name, reason in found.known:
        print(f"  {name}: {reason}")

"""Runs that others measured: rows of a table as candidates of the planner, and what it predicts for them."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from penstock import schedule
from penstock.io.files import read_text
from penstock.planner.cluster import Cluster, hosts
from penstock.planner.estimate import Candidate, Workload, estimate, fullest, stage_costs
from penstock.planner.links import wiring
from penstock.planner.model_costs import RecomputedPart, Style
from penstock.planner.shape import ModelShape, find_model
from penstock.planner.times import Constants, Order, simulate_step
from penstock.settings import Layout

Row = Mapping[str, str]
T = TypeVar("T")

_COLUMNS = ("source", "where", "model", "hardware", "gpus", "precision", "seq_len", "global_batch_seqs", "micro_batch")
# Tensor-parallel ranks are neighbours, and the pipeline goes over hosts, as in Megatron-LM.
_ORDER = "pp-dp-cp-tp"
_VOCABULARY = 51200  # of GPT models by Megatron-LM
_TIMES = ("forward_ms", "backward_input_ms", "backward_weight_ms")

DTYPES = dict.fromkeys(("FP8", "FP8-CS", "FP8-MX", "MXFP8", "Float8"), "fp8") | {"NVFP4": "fp4"}
DTYPES |= dict.fromkeys(("", "BF16", "FP16"), "bf16")
"""The planner's dtype for each value of the column `precision`."""

_PUBLISHED = Style(early_gradients=False, own_engine=False)
_UNFUSED = replace(_PUBLISHED, fused_attention=False)
# torchtitan of December 2024. On an H100 FlashAttention-2 reaches 35% of the peak (arXiv 2407.08608, section 1), and
# from 4 to 8 ranks of a ring each round takes what all scores of a block take at that rate.
_COMPILED = replace(_PUBLISHED, fused_loss=False, fused_casts=False, balanced_ring=False, attention=0.35)
STYLES = {
    "": _PUBLISHED,
    # Before FlashAttention, or without it.
    "unfused": replace(_UNFUSED, sequence_parallel=False),
    "unfused, sequence parallel": _UNFUSED,
    # NVIDIA's performance recipes reduce gradients in 16 bits and, below 16 bits, keep parameters in 8.
    "16-bit gradients": replace(_PUBLISHED, gradient_bytes=2),
    "8-bit parameters, 16-bit gradients": replace(_PUBLISHED, gradient_bytes=2, parameter_bytes=1),
    "compiled": _COMPILED,
    "compiled, AsyncTP": replace(_COMPILED, overlapped_tensor=True),
    "eager": replace(_COMPILED, fused_elements=False),
}
"""The ways of an engine for each value of the column `style`."""


class NotPredicted(ValueError):
    """A row that lacks what a prediction needs."""


@dataclass(frozen=True)
class PublishedRun:
    """A measured run.

    `predict` gives the step's seconds under some constants, `peak_bytes` the memory of its fullest rank, and
    `memory_bytes` that of a device.
    """

    row: Row
    measured_s: float
    #: tokens or, without a length, sequences of a step for each device
    tokens: float

    @property
    def group(self) -> tuple[str, str]:
        """The source and the container or table that its figures are comparable within."""
        where = self.row["where"]
        return self.row["source"], "" if where.startswith("Table") else where

    @property
    def constants_of(self) -> tuple[str, ...]:
        """The runs that share constants with it: those of its group by the same engine."""
        return (*self.group, self.row.get("engine", ""))

    def predict(self, constants: Constants) -> float:
        raise NotImplementedError

    def peak_bytes(self) -> float:
        raise NotImplementedError

    def memory_bytes(self) -> float:
        raise NotImplementedError


@dataclass(frozen=True)
class ShapedRun(PublishedRun):
    """A run known by its model, layout and machines."""

    workload: Workload
    candidate: Candidate
    cluster: Cluster

    def predict(self, constants: Constants) -> float:
        return estimate(self.workload, self.candidate, self.cluster, constants).step_s

    def peak_bytes(self) -> float:
        """The bytes of the fullest rank; with the most recomputation where the source does not name it."""
        candidate = self.candidate
        if not self.row.get("recompute"):
            candidate = replace(candidate, recompute=RecomputedPart.FULL)
        return estimate(self.workload, candidate, self.cluster, Constants()).peak_bytes

    def memory_bytes(self) -> float:
        return self.cluster.memory_bytes


@dataclass(frozen=True)
class TimedRun(PublishedRun):
    """A run whose source published the measured times of a microbatch on a rank (in seconds here)."""

    order: Order
    times_s: tuple[float, float, float]
    transfers_s: tuple[float, ...]
    weight_share: float
    #: the same run by its model and layout, for its memory
    shaped: ShapedRun

    def predict(self, constants: Constants) -> float:
        # An order that is searched for is found with the published times; what comes besides was not known.
        searched = self._costs(Constants(compute=1.0, action_s=0.0)) if self.order.is_searched else None
        return simulate_step(self.order, self._costs(constants), searched).span

    def peak_bytes(self) -> float:
        """The bytes of the fullest rank: those of its model's stages, live as long as in the order that it timed."""
        shaped, known = self.shaped, self._costs(Constants(compute=1.0, action_s=0.0))
        stages = stage_costs(shaped.workload, shaped.candidate, shaped.cluster, Constants())
        sizes = stages.costs.microbatch_bytes, stages.costs.weight_memory_share
        costs = replace(known, microbatch_bytes=sizes[0], weight_memory_share=sizes[1])
        step = simulate_step(self.order, costs, known if self.order.is_searched else None)
        return fullest(shaped.workload, shaped.candidate, shaped.cluster, stages, step).total

    def memory_bytes(self) -> float:
        return self.shaped.memory_bytes()

    def _costs(self, constants: Constants) -> schedule.Costs:
        return schedule.Costs(
            *(time / constants.compute for time in self.times_s),
            transfer=self.transfers_s,
            action=constants.action_s,
            microbatch_bytes=1.0,
            weight_memory_share=self.weight_share,
        )


def read_runs(path: str | Path) -> tuple[list[PublishedRun], list[tuple[Row, str]]]:
    """Read a table of measured runs.

    Returns: the runs that can be predicted, and the other rows with the reason why not.
    Raises: ValueError for a file that cannot be read, or without the columns.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path), newline="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{path} cannot be read: {reason.lower()}") from None
    if not rows:
        raise ValueError(f"{path} has no run; a table of runs has a row for each below the columns' names")
    missing = [name for name in _COLUMNS if name not in rows[0]]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]}; a table of runs has {', '.join(_COLUMNS)} and others")
    runs: list[PublishedRun] = []
    others: list[tuple[Row, str]] = []
    for row in rows:
        try:
            runs.append(_Reader({key: (value or "").strip() for key, value in row.items() if key}).run())
        except (ValueError, ArithmeticError) as error:
            others.append((row, str(error)))
    return runs, others


@dataclass
class _Reader:
    """Reads one row; its properties raise NotPredicted for what the row lacks."""

    #: column -> text, without spaces around it
    row: dict[str, str]

    def named(self, column: str, values: Mapping[str, T]) -> T:
        """The value that the column names; an empty or missing one names that of ""."""
        name = self.row.get(column, "")
        if name not in values:
            raise NotPredicted(f"{column} is {name!r}, which is not known")
        return values[name]

    def number(self, name: str, default: float | None = None) -> float:
        text = self.row.get(name, "")
        if text:
            try:
                value = float(text)
            except ValueError:
                raise NotPredicted(f"{name} is {text!r}, which is no number") from None
            if not 0 < value < math.inf:
                # Tables write 0 for what a run has none of.
                if value == 0 and default is not None:
                    return default
                raise NotPredicted(f"{name} is {text}, which cannot be")
            return value
        if default is None:
            raise NotPredicted(f"{name} is not published")
        return default

    def count(self, name: str, default: int | None = None) -> int:
        return int(self.number(name, default))

    @cached_property
    def layout(self) -> Layout:
        tp, pp, cp = self.count("tp", 1), self.count("pp", 1), self.count("cp", 1)
        dp = self.count("dp", self.count("gpus") // (tp * pp * cp))
        if tp * pp * cp * dp != self.count("gpus"):
            raise NotPredicted(f"tp x pp x cp x dp is not the number of devices, {self.count('gpus')}")
        ep = self.count("ep", 1)
        return Layout(pp=pp, tp=tp, cp=cp, dp=dp, ep=1 if self.folded_ep(tp, cp, dp) else ep, order=_ORDER)

    def folded_ep(self, tp: int, cp: int, dp: int) -> int:
        """The ranks that share experts, where those of tp are among them."""
        ep = self.count("ep", 1)
        return ep if ep > 1 and (dp * cp) % ep else 0

    @cached_property
    def order(self) -> Order:
        name, ranks, vp = self.row.get("schedule", "").lower(), self.layout.pp, self.count("vp", 0)
        if "zb-1p" in name or "zb-2p" in name:
            live = float(ranks * (2 if "2p" in name else 1))
            options = (("effort", 0.0), ("max_live_microbatches", live))
            return Order("auto", ranks, self.microbatches, 1, options)
        known = (("roundpipe", ""), ("fsdp", ""), ("dualpipev", "dualpipe-v"), ("zerobubble", "interleaved-zb"))
        known = (*known, ("gpipe", "afab"), ("interleaved", "interleaved"), ("1f1b-i", "interleaved"))
        found = next((own for part, own in known if part in name), "interleaved" if vp > 1 else "1f1b")
        if not found:
            raise NotPredicted(f"{self.row['schedule']} is no schedule that is known here")
        if found in ("1f1b", "afab") or ranks == 1 or vp == 1:
            return Order("afab" if found == "afab" else "1f1b", ranks, self.microbatches)
        return Order(found, ranks, self.microbatches, vp or 2)

    @cached_property
    def microbatch(self) -> int:
        """The sequences of a microbatch."""
        return self.count("micro_batch", 1)

    @cached_property
    def microbatches(self) -> int:
        if self.row.get("num_microbatches"):
            return self.count("num_microbatches")
        sequences = self.number("global_batch_seqs", self.layout.dp * self.microbatch)
        return max(1, round(sequences / (self.layout.dp * self.microbatch)))

    @cached_property
    def num_sequences(self) -> int:
        return self.layout.dp * self.microbatch * self.microbatches

    @cached_property
    def cluster(self) -> Cluster:
        hardware = self.row["hardware"].lower()
        name = next((name for name in sorted(hosts(), key=len, reverse=True) if name in hardware), None)
        if name is None:
            raise NotPredicted(f"hardware {self.row['hardware']!r} is not known")
        (found,), gpus = Cluster.named(name).kinds, self.count("gpus")
        per_host = min(found.devices_per_host, gpus)
        if gpus > per_host and gpus % per_host:
            # Equal parts of as few of the larger domains as there are.
            per_host = next(size for size in range(per_host, 0, -1) if gpus % size == 0)
        device = found.device
        if (memory := re.search(r"(\d+)gb\b", hardware)) and "gb200" not in hardware:
            device = replace(device, memory_bytes=float(memory[1]) * 2**30)
        if "h100 96gb" in hardware:
            # Those of torchtitan's table have HBM2e, as its page says.
            device = replace(device, memory_bandwidth=2.4e12)
        return Cluster(name, (replace(found, number=gpus // per_host, devices_per_host=per_host, device=device),))

    @cached_property
    def shape(self) -> ModelShape:
        found = find_model(self.row["model"])
        if found is not None:
            return found
        layers, hidden, heads = self.count("layers"), self.count("hidden"), self.count("heads")
        return ModelShape(
            "*-" * layers, hidden, _VOCABULARY, heads, heads, hidden // heads, intermediate_size=4 * hidden, gated=False
        )

    @cached_property
    def recompute(self) -> RecomputedPart:
        return self.named("recompute", {part.value: part for part in RecomputedPart} | {"": RecomputedPart.NONE})

    def measured_s(self) -> float:
        """The measured seconds of a step, from whichever figure is published."""
        tokens = self.num_sequences * self.number("seq_len", 1)
        if self.row.get("iter_time_s"):
            return self.number("iter_time_s")
        if self.row.get("tokens_s_gpu"):
            return tokens / (self.number("tokens_s_gpu") * self.count("gpus"))
        flops = self.shape.flops_per_token(0) + 12 * self.shape.query_width * self.number("seq_len") * (
            self.shape.pattern.count("*")
        )
        again = 4 / 3 if self.recompute is RecomputedPart.FULL else 1
        return tokens * flops * again / (self.number("tflops_gpu") * 1e12 * self.count("gpus"))

    def run(self) -> PublishedRun:
        measured_s = self.measured_s()
        tokens = self.num_sequences * self.number("seq_len", 1) / self.count("gpus")
        if "LoRA" in self.row.get("task", "") or "LoRA" in self.row["model"]:
            raise NotPredicted("adapters are trained, whose weight gradients are few")
        if self.row.get(_TIMES[0]):
            return self._timed(measured_s, tokens)
        return self._shaped(measured_s, tokens)

    def _timed(self, measured_s: float, tokens: float) -> TimedRun:
        hidden, heads, length = self.count("hidden"), self.count("heads"), self.count("seq_len")
        sent = 2 * length * self.microbatch * hidden
        edges = wiring(self.cluster, self.layout).edges
        links = [edge.latency_s + sent * edge.byte_s / Constants().links for edge in edges]
        # Of a layer's (34 + 5 a s / h) s b h bytes, 32 s b h are inputs of products; arXiv 2205.05198, section 4.1.
        share = 32 / (34 + 5 * heads * length / hidden)
        forward_s, input_s, weight_s = (self.number(name) * 1e-3 for name in _TIMES)
        shaped = self._shaped(measured_s, tokens)
        return TimedRun(
            self.row, measured_s, tokens, self.order, (forward_s, input_s, weight_s), tuple(links), share, shaped
        )

    def _shaped(self, measured_s: float, tokens: float) -> ShapedRun:
        layout, order, shape = self.layout, self.order, self.shape
        style = replace(self.named("style", STYLES), folded_ep=self.folded_ep(layout.tp, layout.cp, layout.dp))
        candidate = Candidate(
            layout,
            order.name,
            order.stages_per_rank,
            self.microbatch,
            self.microbatches,
            3 if self.count("fsdp", 0) else 1 if layout.dp * layout.cp > 1 else 0,
            self.recompute,
            order.options,
            _megatron_cut(shape, layout.pp * order.stages_per_rank),
            style,
        )
        workload = Workload(shape, self.count("seq_len"), self.num_sequences, self.named("precision", DTYPES))
        return ShapedRun(self.row, measured_s, tokens, workload, candidate, self.cluster)


def _megatron_cut(shape: ModelShape, num_stages: int) -> tuple[int, ...] | None:
    """As many layers on each stage, with the ends besides, or one less beside each end; None if neither goes evenly."""
    for fewer in (0, 1):
        layers, rest = divmod(len(shape.pattern) // 2 + 2 * fewer, num_stages)
        if not rest and layers >= fewer and len(shape.pattern) % 2 == 0:
            sizes = [2 * layers] * num_stages
            sizes[0] += 1 - 2 * fewer
            sizes[-1] += 1 - 2 * fewer
            return tuple(sizes)
    return None

"""The sections of `gpu_first.py`: what each one runs on a GPU, or at toy sizes on a CPU, and what it says of it.

A section is given `Results` and says each figure as soon as it is there. What must be true has `holds`. Sections that
have several cases begin with those that tell the most, and stop where their time is nearly up.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.cuda import nccl

from penstock import Engine, Layout, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.engine import EngineOptions
from penstock.engine.generation.options import GenerateOptions
from penstock.model import CachedRows, CacheSize, Sequences, decoder_units, units
from penstock.model.cuda.flash import FlashAttention
from penstock.schedule import BatchItem
from penstock.settings import ExpertConfig, LearningRate, ModelConfig, OptimizerConfig, Precision

ROOT = Path(__file__).resolve().parents[1]
Case = TypeVar("Case")


@dataclass(eq=False)
class Results:
    """Where a section says what it finds, line by line: JSON in a file, and the same on the console."""

    #: the file, and the section
    path: Path
    section: str
    #: "cuda", or "cpu" for toy sizes
    device: str
    #: when all began, and when this section will be cut off, by `time.monotonic`
    start: float
    deadline: float
    #: what a person reads meanwhile
    console: TextIO | None = None

    @property
    def is_toy(self) -> bool:
        return self.device == "cpu"

    def some(self, cases: Sequence[Case], num_toys: int = 1) -> Sequence[Case]:
        """The cases; of toys, as many as show that the lines run."""
        return cases[:num_toys] if self.is_toy else cases

    def say(self, what: str, **figures: Any) -> None:
        """Note figures of one kind; `holds` says whether something is as it must be."""
        self.add({"what": what, **figures})

    def add(self, figures: Mapping[str, Any]) -> None:
        line = {"section": self.section, "at_s": time.monotonic() - self.start, **figures}
        text = json.dumps(_rounded(line), default=str)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text[:1000], file=self.console or sys.stdout, flush=True)

    @contextlib.contextmanager
    def trying(self, what: str, **case: Any) -> Iterator[None]:
        """Go on with the next case where this one fails, which is said."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.say(what, **case, holds=False, error=f"{type(error).__name__}: {error}"[:500])

    def has_time(self, seconds: float, what: str) -> bool:
        """Whether so much is left; says what is not measured where it is not."""
        left = self.deadline - time.monotonic()
        if left < seconds:
            self.say("cut short", before=what, left_s=left)
        return left >= seconds

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def seconds(self, act: Callable[[], object], times: int = 3, warm_up: int = 1) -> float:
        """The median time of an act, with all that it leaves for the device to do."""
        for _ in range(warm_up):
            act()
        found = []
        for _ in range(times):
            self.synchronize()
            start = time.perf_counter()
            act()
            self.synchronize()
            found.append(time.perf_counter() - start)
        return statistics.median(found)

    def peak_gib(self) -> float | None:
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(part) for key, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list | tuple) else value


@dataclass(frozen=True)
class Section:
    """A section, its seconds on a device, and what it learns."""

    name: str
    seconds: float
    run: Callable[[Results], None]
    title: str


SECTIONS: dict[str, Section] = {}
"""All sections by name, those that tell the most first."""


def section(seconds: float) -> Callable[[Callable[[Results], None]], Callable[[Results], None]]:
    """Make a function a section that takes so many seconds on a device; its docstring says what it learns."""

    def register(run: Callable[[Results], None]) -> Callable[[Results], None]:
        title = (run.__doc__ or "").partition("\n")[0]
        SECTIONS[run.__name__] = Section(run.__name__, seconds, run, title)
        return run

    return register


# ---- The machine and its libraries


@section(10)
def environment(results: Results) -> None:
    """The machine, all versions, and what its memory and its products reach."""
    is_cuda = results.device == "cuda"
    results.say(
        "versions",
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
        nccl=".".join(map(str, nccl.version())) if is_cuda else None,
        commit=_output("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
    )
    names = (
        "transformers",
        "triton",
        "datasets",
        "uvicorn",
        "starlette",
        "peft",
        "pytest",
        "xdist",
    )
    results.say("libraries", missing=[name for name in names if importlib.util.find_spec(name) is None])
    query = "--query-gpu=name,driver_version,memory.total,clocks.max.sm,power.limit"
    results.say(
        "machine",
        processor=platform.processor() or platform.machine(),
        cores=os.cpu_count(),
        gpus=torch.cuda.device_count(),
        gpu=_output("nvidia-smi", query, "--format=csv,noheader"),
        tf32=torch.backends.cuda.matmul.allow_tf32,
    )
    side, copied = (256, 1 << 20) if results.is_toy else (8192, 1 << 30)
    x = torch.randn(side, side, device=results.device).bfloat16()
    rate = 2 * side**3 / results.seconds(lambda: x @ x, 10)
    source = torch.empty(copied, dtype=torch.uint8, device=results.device)
    bandwidth = 2 * copied / results.seconds(source.clone, 10)
    results.say("ceilings", bf16_tflops=rate / 1e12, memory_gb_per_s=bandwidth / 1e9)


def _output(*command: str) -> str:
    """What a command prints, or why there is nothing."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"


@section(12)
def nccl_api(results: Results) -> None:
    """Each collective of the package over NCCL, in a world of one rank, before a cut and after it."""
    from penstock.parallel.collectives import Collectives
    from penstock.parallel.renewable import new_renewable_group

    kind = "nccl" if results.device == "cuda" else "gloo"
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "nccl" else kind, store=store, rank=0, world_size=1)
    before = torch.cuda.mem_get_info()[0] if kind == "nccl" else 0
    start = time.perf_counter()
    group: Any = new_renewable_group([0], kind, timedelta(seconds=60))
    x = torch.arange(8.0, device=results.device)
    for generation in (0, 1):
        own = Collectives(group)
        calls: dict[str, Callable[[], Any]] = {
            "all_to_all": lambda own=own: own.all_to_all(x.clone(), [8], [8]),
            "all_gather": lambda own=own: own.all_gather(x),
            "reduce_scatter": lambda own=own: own.reduce_scatter(x.clone()),
            "all_reduce": lambda own=own: own.all_reduce(x),
            "send_receive": lambda own=own: own.send_receive(x, 0, 0),
            "sum_gradients": lambda own=own: own.sum_gradients(x.clone()),
            "sum_owned_gradients": lambda own=own: own.sum_owned_gradients(x.clone()),
            "gather_owned": lambda own=own: own.gather_owned(x.clone()),
            "sum_gradients_at": lambda own=own: own.sum_gradients_at(x.clone(), 0),
            "spread_from": lambda own=own: own.spread_from(x.clone(), 0),
        }
        for name, call in calls.items():
            with results.trying(name, generation=generation):
                results.say(name, generation=generation, holds=torch.equal(call().wait().flatten()[:8], x))
        if generation == 0:
            if kind == "nccl":
                free = torch.cuda.mem_get_info()[0]
                results.say("a communicator", held_mib=(before - free) / 2**20, first_use_s=time.perf_counter() - start)
            start = time.perf_counter()
            group.abort()
            group.renew(1)
            results.say("cut and renewed", took_s=time.perf_counter() - start)
    if kind == "nccl":
        backend: Any = dist.ProcessGroupNCCL
        options = backend.Options()
        has = {
            "max_ctas": hasattr(options.config, "max_ctas"),
            "high_priority": hasattr(options, "is_high_priority_stream"),
            "together": hasattr(backend, "_group_start") and hasattr(backend, "_group_end"),
            "split": hasattr(options, "split_from") and hasattr(options.config, "split_share"),
        }
        results.say("options of NCCL", **has)
    dist.destroy_process_group()


@section(20)
def sdpa(results: Results) -> None:
    """The kernel that each form of attention gets, and what a length costs that is new."""
    heads, width = (4, 32) if results.is_toy else (16, 128)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, device=results.device, dtype=torch.bfloat16)

    def prompt(n: int, count: int = 2) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        q, k, v = (draw(count, h, n, width) for h in (heads, heads // 4, heads // 4))
        return (q, k, v), {"is_causal": True, "enable_gqa": True}

    def chunk(n: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        mask = torch.ones(64, n, dtype=torch.bool, device=results.device)
        keys = [draw(1, heads // 4, n, width) for _ in range(2)]
        return (draw(1, heads, 64, width), *keys), {"attn_mask": mask, "enable_gqa": True}

    def live_rows(n: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (draw(1, 4, 4, width), draw(1, 4, n, width), draw(1, 4, n, width)), {}

    def all_rows(n: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        n = n // 64 * 64
        mask = torch.ones(16, 1, 1, n, dtype=torch.bool, device=results.device)
        return (draw(16, 4, 4, width), draw(16, 4, n, width), draw(16, 4, n, width)), {"attn_mask": mask}

    forms = {"a run of equal texts": prompt, "a prompt's later chunk": chunk, "live rows": live_rows}
    forms["all rows, by a mask"] = all_rows
    kinds = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
    for has_cudnn in (True,) if results.is_toy else (True, False):
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        for name, make in forms.items():
            with results.trying(name, cudnn=has_cudnn):
                new = []
                for n in (517, 523, 541):
                    args, more = make(n)
                    new.append(1e3 * results.seconds(functools.partial(_attend, args, more), 1, 0))
                known = 1e3 * results.seconds(functools.partial(_attend, args, more), 10)
                chosen = torch.ops.aten._fused_sdp_choice(
                    *args,
                    more.get("attn_mask"),
                    0.0,
                    more.get("is_causal", False),
                    enable_gqa=more.get("enable_gqa", False),
                )
                results.say(name, cudnn=has_cudnn, kernel=kinds[int(chosen)], new_ms=new, known_ms=known)
    torch.backends.cuda.enable_cudnn_sdp(True)
    if results.device == "cuda":
        _variable_lengths(results)


def _attend(args: tuple[Any, ...], more: Mapping[str, Any]) -> Tensor:
    return F.scaled_dot_product_attention(*args, **more)


def _variable_lengths(results: Results) -> None:
    """Attention by the flash kernels as Penstock calls them: packed texts, and rows of a cache."""
    lengths, device = (300, 77, 129, 518), torch.device(results.device)
    kernel, sequences = FlashAttention(16, 4, 128), Sequences.from_lengths(lengths, device)
    q, k, v = (torch.randn(sum(lengths), n, 128, device=device, dtype=torch.bfloat16) for n in (16, 4, 4))
    exact = torch.cat(
        [
            F.scaled_dot_product_attention(
                *(x.transpose(0, 1)[None].double() for x in one), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)
            for one in zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
        ]
    )
    with results.trying("packed, by flash"):
        packed = functools.partial(kernel.packed, q, k, v, sequences)
        ms, error = 1e3 * results.seconds(packed, 10), float((packed().double() - exact).abs().max())
        results.say("packed, by flash", ms=ms, error=error, holds=error < 0.02)
    size = CacheSize(len(lengths), 4096, torch.bfloat16, device)
    with results.trying("rows of a cache, by flash"):
        cache, starts = kernel.new_cache(size), [0, *itertools.accumulate(lengths)]
        whole = CachedRows.of([BatchItem(i, i, 0, n, True) for i, n in enumerate(lengths)], device)
        whole.write(cache, k, v)
        last = torch.tensor(starts[1:], device=device) - 1
        singles = CachedRows.of([BatchItem(i, i, n - 1, 1, True) for i, n in enumerate(lengths)], device)
        decoded = functools.partial(kernel.cached, q[last], k[last], v[last], cache, singles)
        ms = 1e3 * results.seconds(decoded, 10)
        error = float((decoded().double() - exact[last]).abs().max())
        error = max(error, float((kernel.cached(q, k, v, cache, whole).double() - exact).abs().max()))
        results.say("rows of a cache, by flash", ms=ms, error=error, holds=error < 0.02)


# ---- Steps of small models: what waits, what is equal


SMALL = ModelConfig(512, 128, 256, 4, 4, num_kv_heads=2, max_length=1024)
EXPERTS = ModelConfig(
    *(512, 128, 256, 4, 4),
    num_kv_heads=2,
    max_length=1024,
    experts=ExpertConfig(8, 2, 64, shared_size=64, num_dense_first=1, microbatch_loss=0.01, z_loss=1e-3),
)
LENGTHS = (300, 700, 129, 1, 64, 64, 511, 33)
NUM_MICROBATCHES = 4


def _small_batch(results: Results, rank: int = 0, dp: int = 1) -> PackedBatch:
    """The texts of one of so many data-parallel ranks."""
    generator = torch.Generator().manual_seed(1)
    lengths = tuple(max(1, n // 10) for n in LENGTHS) if results.is_toy else LENGTHS
    texts = [torch.randint(0, 512, (n,), generator=generator) for n in lengths]
    return PackedBatch.from_documents(texts[rank::dp])


def _small_engine(config: ModelConfig, device: str, schedule: str, layout: Layout | None = None, **more: Any) -> Engine:
    optimizer = OptimizerConfig(LearningRate(1e-3), clip_norm=1.0)
    options = EngineOptions(schedule, device=device, optimizer=optimizer, timeout_s=60.0, **more)  # pyright: ignore
    return Engine(lambda groups: decoder_units(config, groups=groups), config.hidden_size, layout, options)


@dataclass(frozen=True, eq=False)
class Trained:
    """Two steps: their losses, and by parameter the first one's gradients and the last one's weights."""

    losses: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]

    def apart(self, other: Trained) -> float:
        """The largest difference of a gradient, as a share of its norm."""
        pairs = [(self.gradients[name], other.gradients[name]) for name in self.gradients]
        return max(float((one - two).norm() / one.norm().clamp(min=1e-12)) for one, two in pairs)

    def is_same(self, other: Trained) -> bool:
        """Whether losses and weights have the same bits."""
        return self.losses == other.losses and all(torch.equal(self.weights[n], other.weights[n]) for n in self.weights)


def _trained(engine: Engine, batch: PackedBatch) -> Trained:
    spec = MicroBatchSpec(num=NUM_MICROBATCHES)
    losses = [engine.train_batch(batch, micro_batches=spec).loss]
    gradients = {name: engine.gradient(name).double().cpu() for name in engine.parameters()}
    losses.append(engine.train_batch(batch, micro_batches=spec).loss)
    weights = {name: own.detach().cpu() for name, own in engine.parameters().items()}
    engine.close()
    return Trained(losses, gradients, weights)


@section(20)
def syncs(results: Results) -> None:
    """Where the host waits for the device, by PyTorch's own detector: in a step, and in generation."""
    from penstock.engine.training.trainer import Trainer
    from penstock.runtime import Executor

    kinds = ((SMALL, "none"), (EXPERTS, "none"), (SMALL, "full"), (EXPERTS, "full"))
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    phases = [
        (Executor, "run"),
        (Trainer, "feeds"),
        (Trainer, "finish_gradients"),
        (Trainer, "step_weights"),
        (Engine, "generate"),
    ]
    with contextlib.ExitStack() as stack:
        for kind, name in phases:
            stack.enter_context(_watched(results, kind, name, found))
        for config, recompute in results.some(kinds, 2):
            case = {"experts": config is EXPERTS, "recompute": recompute}
            found.clear()
            engine = _small_engine(config, results.device, "1f1b", precision="bf16", recompute=recompute)
            engine.train_batch(_small_batch(results), micro_batches=MicroBatchSpec(num=NUM_MICROBATCHES))
            number = sum(number for (phase, _), number in found.items() if phase == "run")
            found_so = {"in_program": number, "holds": number == 0, "places": _places(found)}
            results.say("a step of 4 microbatches, 4 layers", **case, **found_so)
            if recompute == "none":
                found.clear()
                engine.generate([[1, 2, 3]] * 4, SamplingParams(max_new_tokens=9, temperature=1.0, top_k=20))
                found_so = {"waits": found.total(), "places": _places(found)}
                results.say("generation of 9 tokens a row, 4 rows", **case, **found_so)
            engine.close()


def _places(found: Mapping[tuple[str, str], int]) -> list[dict[str, Any]]:
    ordered = sorted(found.items(), key=lambda one: -one[1])
    return [{"in": phase, "place": place, "times": number} for (phase, place), number in ordered]


@contextlib.contextmanager
def _watched(results: Results, kind: type, name: str, found: collections.Counter[tuple[str, str]]) -> Iterator[None]:
    """Count what waits in calls of a method, by the package's line; on a CPU what would wait, by the operation."""
    original = getattr(kind, name)

    def note(message: Any, *rest: Any, **more: Any) -> None:
        if "synchroniz" in str(message):
            frames = [f for f in traceback.extract_stack() if "/penstock/" in f.filename]
            place = f"{frames[-1].filename.rpartition('/penstock/')[2]}:{frames[-1].lineno}" if frames else "elsewhere"
            found[name, place] += 1

    def call(*args: Any, **settings: Any) -> Any:
        if results.device == "cpu":
            from tests.host_waits import HostWaits

            waits = HostWaits()
            with waits.watch():
                returned = original(*args, **settings)
            found.update({(name, operation): number for operation, number in waits.reads.items()})
            return returned
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                return original(*args, **settings)
            finally:
                torch.cuda.set_sync_debug_mode("default")

    setattr(kind, name, call)
    try:
        yield
    finally:
        setattr(kind, name, original)


@section(40)
def equal(results: Results) -> None:
    """Every kind of step against the CPU, and the bits of a run against itself and against other schedules."""
    # Before the first product: without it cuBLAS has no deterministic kernels.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    batch = _small_batch(results)
    cases: list[tuple[str, ModelConfig, dict[str, Any]]] = [
        ("1f1b", SMALL, {}),
        ("1f1b", EXPERTS, {}),
        ("zb-v", SMALL, {}),
        ("combined-1f1b", EXPERTS, {}),
        ("1f1b", SMALL, {"recompute": "full"}),
        ("interleaved", SMALL, {}),
        ("zb-h1", SMALL, {}),
    ]
    for schedule, config, more in results.some(cases):
        case = {"schedule": schedule, "experts": config is EXPERTS, "recompute": more.get("recompute", "none")}
        if not results.has_time(3, f"{case}"):
            return
        with results.trying("against the CPU", **case):
            own, cpu = (_trained(_small_engine(config, d, schedule, **more), batch) for d in (results.device, "cpu"))
            apart, losses = cpu.apart(own), (cpu.losses, own.losses)
            # fp32 sums in another order; the second loss has seen a step of Adam, which magnifies the smallest ones.
            holds = apart < 1e-3 and all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(*losses, strict=True))
            figures = {"gradients_apart": apart, "losses": own.losses, "on_the_cpu": cpu.losses}
            results.say("against the CPU", **case, holds=holds, **figures)
    kinds = list(itertools.product((False, True), ("bf16", "fp32", "bf16-autocast"), (SMALL, EXPERTS)))
    for is_deterministic, precision, config in results.some(kinds):
        case = {"deterministic": is_deterministic, "precision": precision, "experts": config is EXPERTS}
        if not results.has_time(4, f"{case}"):
            return
        torch.use_deterministic_algorithms(is_deterministic)
        with results.trying("bits", **case):
            one, same, apart = (
                _trained(_small_engine(config, results.device, schedule, precision=precision), batch)
                for schedule in ("1f1b", "1f1b", "combined-1f1b" if config is EXPERTS else "zb-h1")
            )
            results.say("bits", **case, of_a_run=one.is_same(same), of_another_schedule=one.is_same(apart))


# ---- A model of 1.5 billion parameters: generation, training, memory, and the bar


def _large(results: Results) -> ModelConfig:
    if results.is_toy:
        return ModelConfig(512, 64, 128, 2, 4, num_kv_heads=2, max_length=512)
    return ModelConfig(128256, 2048, 8192, 16, 32, num_kv_heads=8, max_length=8192)


def _large_engine(results: Results, **options: Any) -> Engine:
    """The engine, with weights that are drawn on the device: on one core a billion numbers take fifteen seconds."""

    def drawn(full_name: str, shape: torch.Size, rule: units.Initial, seed: int) -> Tensor:
        values = torch.full(shape, rule.mean, device=results.device)
        return (values.normal_(rule.mean, rule.std) if rule.std else values).cpu()

    config, on_host = _large(results), units.initial_values
    units.initial_values = drawn
    try:
        given = EngineOptions(precision=Precision.BF16, device=results.device, **options)  # pyright: ignore
        return Engine(decoder_units(config), config.hidden_size, options=given)
    finally:
        units.initial_values = on_host


@section(55)
def generate(results: Results) -> None:
    """Tokens a second by graphs and by live rows, of equal and unequal prompts, and what a first call costs."""
    start = time.perf_counter()
    engine = _large_engine(results, learns=False)
    results.say("an engine is made", took_s=time.perf_counter() - start)
    config, num_new = _large(results), 8 if results.is_toy else 64
    generator = torch.Generator().manual_seed(0)
    weight_bytes = 2 * sum(own.numel() for name, own in engine.parameters().items() if not name.startswith("embedding"))

    def prompts(lengths: Sequence[int], rows: int) -> list[list[int]]:
        each = [lengths[i % len(lengths)] for i in range(rows)]
        return [torch.randint(0, config.vocabulary, (n,), generator=generator).tolist() for n in each]

    equal, unequal = (64,), (40, 55, 64, 97, 130)
    cases = [("graphs", 1, equal, 0.0), ("graphs", 64, unequal, 0.0), ("live-rows", 16, unequal, 0.0)]
    cases += [("graphs", 64, equal, 0.0), ("graphs", 64, equal, 1.0), ("live-rows", 1, equal, 0.0)]
    cases += [("live-rows", 64, equal, 0.0), ("graphs", 16, unequal, 0.0)]
    for form, rows, lengths, temperature in results.some(cases):
        case = {"form": form, "rows": rows, "lengths": list(lengths), "temperature": temperature}
        if not results.has_time(5, f"{case}"):
            break
        params = SamplingParams(max_new_tokens=num_new, temperature=temperature)
        options, asked = GenerateOptions(decode=form, rows_per_slot=rows), prompts(lengths, rows)
        with results.trying("decoding", **case):
            first = results.seconds(functools.partial(engine.generate, asked, params, options), 1, 0)
            found = engine.generate(asked, params, options)
            took = results.seconds(functools.partial(engine.generate, asked, params, options), 1, 0)
            per_s = {"tokens_per_s": rows * num_new / took, "weights_gb_per_s": weight_bytes * num_new / took / 1e9}
            rounds = {"ms_a_round": 1e3 * took / max(1, found.num_rounds), "idle_share_as_reported": found.idle_share}
            results.say("decoding", **case, first_call_s=first, **per_s, **rounds)
    one = SamplingParams(max_new_tokens=1, temperature=0)
    for length in (100, 90) if results.is_toy else (2000, 1777, 1999):
        if results.has_time(4, f"a prompt of {length} tokens"):
            asked = prompts((length,), 1)
            first, again = (results.seconds(functools.partial(engine.generate, asked, one), 1, 0) for _ in range(2))
            results.say("a prompt", tokens=length, first_s=first, again_s=again)
    results.say("memory", peak_gib=results.peak_gib())


def _train_batch(results: Results, equal_length: bool) -> PackedBatch:
    """Tokens of four microbatches: in texts of one length, or of random ones."""
    each, vocab_size = 128 if results.is_toy else 8192, _large(results).vocabulary
    generator, lengths = torch.Generator().manual_seed(0), []
    while (left := NUM_MICROBATCHES * each - sum(lengths)) > 0:
        drawn = each // 4 if equal_length else int(torch.randint(each // 16, each // 2, (1,), generator=generator))
        lengths.append(min(left, drawn))
    return PackedBatch.from_documents([torch.randint(0, vocab_size, (n,), generator=generator) for n in lengths])


_BATCHES = (("texts of one length", True), ("texts of many lengths", False))
_RATES = OptimizerConfig(LearningRate(1e-4), clip_norm=1.0)


@section(50)
def train(results: Results) -> None:
    """Tokens a second of training, the host's time, the kernels' share, memory; equal texts and unequal ones."""
    from penstock.runtime import Executor

    start = time.perf_counter()
    engine = _large_engine(results, optimizer=_RATES)
    num_parameters = sum(own.numel() for own in engine.parameters().values())
    results.say("an engine is made", took_s=time.perf_counter() - start, parameters=num_parameters)
    run, in_program = Executor.run, list[float]()

    def timed(self: Any, feeds: Any) -> Any:
        start = time.perf_counter()
        returned = run(self, feeds)
        in_program.append(time.perf_counter() - start)
        return returned

    Executor.run = timed  # type: ignore[method-assign]
    spec = MicroBatchSpec(num=NUM_MICROBATCHES)
    for name, is_equal in results.some(_BATCHES):
        if not results.has_time(8, name):
            break
        with results.trying("steps", batch=name):
            batch = _train_batch(results, is_equal)
            step = functools.partial(engine.train_batch, batch, micro_batches=spec)
            first = results.seconds(step, 1, 0)
            if results.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            in_program.clear()
            took = results.seconds(step, 3, 1)
            rates = {
                "tokens_per_s": batch.num_tokens / took,
                "tflops": 6e-12 * num_parameters * batch.num_tokens / took,
            }
            host = {"host_in_program_s": statistics.median(in_program), "idle_share_as_reported": step().idle_share}
            results.say("steps", batch=name, first_s=first, step_s=took, **rates, **host, peak_gib=results.peak_gib())
        if is_equal:
            with results.trying("a profile"):
                _profile(results, step)
    Executor.run = run  # type: ignore[method-assign]


def _profile(results: Results, step: Callable[[], object]) -> None:
    """Where a step's time goes on the device, and how many kernels it takes."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if results.device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind]) as found:
        took = results.seconds(step, 1, 0)
    events = [event for event in found.key_averages() if event.device_type.name == kind.name]
    own_s = [(event.self_cpu_time_total if results.is_toy else event.self_device_time_total) / 1e6 for event in events]
    longest = sorted(zip(own_s, events, strict=True), key=lambda one: -one[0])[:25]
    results.say(
        "a profile",
        step_s=took,
        kernels_s=sum(own_s),
        kernels=sum(event.count for event in events),
        longest=[{"kernel": event.key[:90], "times": event.count, "ms": 1e3 * own} for own, event in longest],
    )


@section(10)
def rehearsed(results: Results) -> None:
    """The memory of the training step as rehearsed, beside what `train` measured; needs no device."""
    from penstock.engine.rehearsal.step import RehearsedBatch, rehearse

    config = _large(results)
    lines = [json.loads(line) for line in results.path.read_text().splitlines()] if results.path.exists() else []
    peaks = {line["batch"]: line.get("peak_gib") for line in lines if line.get("what") == "steps" and "batch" in line}
    for name, is_equal in results.some(_BATCHES):
        options = EngineOptions("1f1b", precision=Precision.BF16, device=results.device, optimizer=_RATES)  # pyright: ignore
        batch = RehearsedBatch(_train_batch(results, is_equal).sequence_lengths(), MicroBatchSpec(num=NUM_MICROBATCHES))
        start = time.perf_counter()
        found = rehearse(
            lambda groups: decoder_units(config, groups=groups), config.hidden_size, Layout(), options, batch
        )
        peak, real = found.peak_bytes / 2**30, peaks.get(name)
        figures = {"rehearsed_gib": peak, "measured_gib": real, "took_s": time.perf_counter() - start}
        if real:
            # A tenth for what libraries take of the allocator: workspaces of cuBLAS, kernels' own buffers.
            figures |= {"rehearsed_share": peak / real, "holds": 0.9 < peak / real < 1.1}
        results.say("peak", batch=name, **figures)


@section(30)
def plain(results: Results) -> None:
    """The bar: the same tokens by transformers' model in a plain loop, with fused AdamW on fp32 masters and without."""
    from transformers import LlamaConfig, LlamaForCausalLM

    ours = _large(results)
    config = LlamaConfig(
        vocab_size=ours.vocabulary,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.num_kv_heads,
        max_position_embeddings=ours.max_length,
    )
    with torch.device(results.device):
        model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    weights, each = list(model.parameters()), 128 if results.is_toy else 8192
    tokens = torch.randint(0, ours.vocabulary, (NUM_MICROBATCHES, 4, each // 4), device=results.device)
    for has_masters in results.some((True, False)):
        if not results.has_time(6, f"masters: {has_masters}"):
            return
        if results.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        masters = [w.detach().float().requires_grad_() for w in weights] if has_masters else weights
        optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
        step = functools.partial(_plain_step, model, weights, masters, optimizer, tokens)
        first, took = results.seconds(step, 1, 0), results.seconds(step, 3, 1)
        rate = tokens.numel() / took
        what = {"fp32_masters": has_masters, "first_s": first, "step_s": took, "tokens_per_s": rate}
        results.say("transformers in a plain loop", **what, peak_gib=results.peak_gib())


def _plain_step(
    model: Any, weights: list[nn.Parameter], masters: list[Any], optimizer: torch.optim.Optimizer, tokens: Tensor
) -> None:
    for weight in weights:
        weight.grad = None
    for rows in tokens:
        hidden = model.model(rows, use_cache=False).last_hidden_state
        logits = model.lm_head(hidden).flatten(0, 1).float()
        (F.cross_entropy(logits, rows.flatten()) / len(tokens)).backward()
    nn.utils.clip_grad_norm_(weights, 1.0)
    if masters is not weights:
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
    optimizer.step()
    if masters is not weights:
        with torch.no_grad():
            torch.ops.aten._foreach_copy_(weights, masters)


# ---- Several ranks on one GPU


_SHARED = [
    ("1f1b", Layout(pp=2), False),
    ("zb-v", Layout(pp=2), False),
    ("1f1b", Layout(dp=2), False),
    ("1f1b", Layout(tp=2), False),
    ("1f1b", Layout(dp=2, ep=2), True),
    ("combined-1f1b", Layout(dp=2, ep=2), True),
    ("interleaved", Layout(pp=2), False),
    ("dualpipe", Layout(pp=2), False),
    ("1f1b", Layout(cp=2), False),
]


@section(30)
def several_ranks(results: Results) -> None:
    """Two ranks that share the GPU, by messages through host memory: each layout's step against one rank's."""
    from benchmarks.ranks import Team

    has_option = "transport" in {field.name for field in fields(EngineOptions)}
    if not has_option:
        results.say("missing", why='EngineOptions has no transport="host", by which ranks can share a GPU')
        if results.device == "cuda":
            return
    options = {"transport": "host"} if has_option else {}
    batch = _small_batch(results)
    limit_s = max(5.0, results.deadline - time.monotonic() - 2)
    # Forked before this process uses the GPU, they need not import everything.
    with Team(2, limit_s=limit_s, context=multiprocessing.get_context("fork")) as team:  # pyright: ignore
        for schedule, layout, has_experts in results.some(_SHARED):
            case = {"schedule": schedule, "layout": str(layout), "experts": has_experts}
            if not results.has_time(4, f"{case}"):
                return
            # The first failure ends the team, and the section with it.
            found = team.call(_step_of_rank, schedule, layout, has_experts, replace(results, console=None), options)
            alone = _trained(_small_engine(EXPERTS if has_experts else SMALL, results.device, schedule), batch)
            losses, took = found[0][0], max(seconds for _, seconds in found)
            holds = all(math.isclose(*pair, rel_tol=1e-3) for pair in zip(losses, alone.losses, strict=True))
            figures = {"losses": losses, "of_one_rank": alone.losses, "two_steps_s": took}
            results.say("a step of two ranks", **case, holds=holds, **figures)


def _step_of_rank(
    rank: int, schedule: str, layout: Layout, has_experts: bool, results: Results, options: Mapping[str, Any]
) -> tuple[list[float], float]:
    """The losses of two steps on one of the ranks, and their seconds."""
    engine = _small_engine(EXPERTS if has_experts else SMALL, results.device, schedule, layout, **options)
    batch = _small_batch(results, layout.coordinates(rank).dp, layout.dp)
    start, spec = time.perf_counter(), MicroBatchSpec(num=NUM_MICROBATCHES)
    losses = [engine.train_batch(batch, micro_batches=spec).loss for _ in range(2)]
    engine.close()
    return losses, time.perf_counter() - start


@section(15)
def posted_receives(results: Results) -> None:
    """What a product costs beside kernels that hold some of the processors, as receives of NCCL do that wait."""
    if results.device != "cuda":
        held = contextlib.nullcontext
        side, counts = 64, (0, 4)
    else:
        from gpu_kernels import hold  # pyright: ignore[reportMissingImports]

        held, side, counts = hold, 8192, (0, 1, 4, 8, 16, 32, 64, 128)
    x = torch.randn(side, side, device=results.device, dtype=torch.bfloat16)

    def product() -> Tensor:
        return x @ x

    product()
    alone = results.seconds(product, 5)
    for count in counts:
        with results.trying("a product", held=count):
            times = []
            for _ in range(3):
                with held(count) if count else contextlib.nullcontext():
                    times.append(_timed_on_stream(results, product))
            took = statistics.median(times)
            results.say("a product", held=count, ms=1e3 * took, times_as_long=took / alone)


def _timed_on_stream(results: Results, act: Callable[[], object]) -> float:
    """The seconds of an act by events of the current stream, while other streams are busy."""
    if results.device != "cuda":
        return results.seconds(act, 1)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(3):
        act()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e-3 / 3


# ---- Tests, and what a user sees


@section(50)
def tests(results: Results) -> None:
    """tests/gpu: each test that fails as soon as it has, and all outcomes."""
    if importlib.util.find_spec("pytest") is None:
        results.say("missing", why="pytest is not installed")
        return
    import pytest

    outcomes: collections.Counter[str] = collections.Counter()

    class Lines:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.when == "call" or not report.passed:
                outcomes[report.outcome] += 1
            if report.failed:
                reason = str(report.longrepr).strip().splitlines()[-1]
                results.say("a test", test=report.nodeid, holds=False, took_s=report.duration, reason=reason[:300])

    words = ["-p", "no:cacheprovider", "-q", "-m", "gpu", "--rootdir", str(ROOT), str(ROOT / "tests" / "gpu")]
    if results.is_toy:
        os.environ["PENSTOCK_GPU_TESTS_ON_CPU"] = "1"
        words += ["-k", "ids_that_no_word"]
    elif importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(min(6, os.cpu_count() or 1))]
    start = time.perf_counter()
    code = pytest.main(words, plugins=[Lines()])
    results.say("outcomes", **outcomes, exit_code=int(code), took_s=time.perf_counter() - start, holds=int(code) == 0)


@section(15)
def two_ranks_on_one(results: Results) -> None:
    """The README's first example by two processes: what a user of one GPU is told."""
    example = ROOT / "examples" / "own_layers.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(example)]
    left = results.deadline - time.monotonic() - 2
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(1.0, left))
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode(errors="replace") if error.stderr else ""
        results.say("two processes", holds=False, ends="never", said=said[-1500:])
        return
    # Either it runs, or one sentence says why not.
    holds = done.returncode == 0 or not any(word in done.stderr for word in ("Duplicate GPU", "Traceback"))
    said = (done.stdout[-500:] + "\n" + done.stderr[-1500:]).strip()
    results.say("two processes", holds=holds, exit_code=done.returncode, said=said)

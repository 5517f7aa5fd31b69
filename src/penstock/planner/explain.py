"""Why one layout is slower than another, and why the well-known layouts are not the fastest."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.planner.cluster import Cluster
from penstock.planner.estimate import Candidate, Estimate, Workload, estimate
from penstock.planner.model_costs import RecomputedPart
from penstock.planner.times import Constants
from penstock.settings import ConfigError, Layout

_ORDER = "pp-dp-cp-tp"
_GIB = 2**30


def comparison(first: Estimate, second: Estimate) -> list[str]:
    """Say where the second one's step takes longer than the first one's, the largest difference first."""
    lines = [
        f"A {first.candidate}: {first.step_s:.4g} s a step, {first.peak_bytes / _GIB:.1f} GiB",
        f"B {second.candidate}: {second.step_s:.4g} s a step, {second.peak_bytes / _GIB:.1f} GiB",
        f"B takes {second.step_s / first.step_s:.3f} times A's step",
    ]
    for part, difference in slower_parts(first, second):
        more = "more" if difference > 0 else "less"
        lines.append(f"  {part}: {abs(difference):.4g} s {more} ({abs(difference) / first.step_s:.1%} of A's step)")
    return lines


def slower_parts(first: Estimate, second: Estimate) -> list[tuple[str, float]]:
    """The seconds that each part of the second's step takes more than the first's, the largest first."""
    parts = dict.fromkeys([*first.parts_s, *second.parts_s])
    found = [(part, second.parts_s.get(part, 0.0) - first.parts_s.get(part, 0.0)) for part in parts]
    return sorted((one for one in found if one[1]), key=lambda one: -abs(one[1]))


def well_known(
    workload: Workload, cluster: Cluster, constants: Constants, best: Estimate
) -> tuple[tuple[str, str], ...]:
    """The layouts that many would start with, each with the reason why it is not the first of a plan."""
    known = _known(workload, cluster)
    return tuple((name, _reason(candidates, workload, cluster, constants, best)) for name, candidates in known)


def _known(workload: Workload, cluster: Cluster) -> Iterator[tuple[str, list[Candidate]]]:
    """Yield well-known layouts, each with its candidates from the one that keeps the least on."""
    devices, in_host = cluster.num_devices, min(cluster.smallest_host, 8)
    again = (RecomputedPart.NONE, RecomputedPart.FULL)

    def made(tp: int, pp: int, name: str, stages: int) -> list[Candidate]:
        dp, rest = divmod(devices, tp * pp)
        if rest or not dp or workload.num_sequences % dp:
            return []
        try:
            layout = Layout(pp=pp, dp=dp, tp=tp, order=_ORDER)
        except ConfigError:
            return []
        number = workload.num_sequences // dp
        zero = 1 if dp > 1 else 0
        return [Candidate(layout, name, stages, 1, number, zero, recompute) for recompute in again]

    yield "data parallel alone, with ZeRO-1", made(1, 1, "1f1b", 1)
    yield f"tensor parallel in groups of {in_host}, data parallel beyond", made(in_host, 1, "1f1b", 1)
    pipelines = [pp for pp in (2, 4, 8, 16, 32) if pp <= devices and pp <= len(workload.shape.pattern)]
    yield "pipeline alone, 1F1B", [one for pp in reversed(pipelines) for one in made(1, pp, "1f1b", 1)]
    with_tensor = [one for pp in pipelines for one in made(in_host, pp, "interleaved", 2)]
    yield f"tensor parallel in groups of {in_host}, interleaved 1F1B beyond (Megatron-LM's advice)", with_tensor
    yield "ZB-V, without tensor parallelism", [one for pp in reversed(pipelines) for one in made(1, pp, "zb-v", 2)]


def _reason(
    candidates: list[Candidate], workload: Workload, cluster: Cluster, constants: Constants, best: Estimate
) -> str:
    """Say why the first candidate that fits is slower, or that none fits."""
    if not candidates:
        return f"{workload.num_sequences} sequences and {cluster.num_devices} devices cannot be shared so"
    least: Estimate | None = None
    for candidate in candidates:
        try:
            found = estimate(workload, candidate, cluster, constants)
        except ValueError:
            continue
        if found.fits:
            if replace(found.candidate, options=()) == replace(best.candidate, options=(), cut=found.candidate.cut):
                return "is the first of the plan"
            parts = [f"{part} {more / best.step_s:+.0%}" for part, more in slower_parts(best, found)[:3] if more > 0]
            slower = f"{found.step_s / best.step_s - 1:.1%} slower"
            return f"{slower} ({found.candidate}): {', '.join(parts) or 'no part alone'}"
        if least is None or found.peak_bytes < least.peak_bytes:
            least = found
    if least is None:
        return "the schedule cannot be built in these sizes"
    return f"does not fit: {least.peak_bytes / _GIB:,.1f} GiB of {least.memory.device / _GIB:,.1f} ({least.candidate})"

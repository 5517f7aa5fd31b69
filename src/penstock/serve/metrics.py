"""Counts of the server, in Prometheus's text format."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass
class SecondsHistogram:
    """Durations, counted by the least of some limits that they do not exceed."""

    #: the limits, ascending
    limits_s: Sequence[float]
    #: durations by the least limit that they do not exceed, and those beyond the last
    counts: list[int] = field(default_factory=list)
    #: all durations together
    sum_s: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.limits_s) + 1)

    def add(self, duration_s: float) -> None:
        self.counts[bisect_left(self.limits_s, duration_s)] += 1
        self.sum_s += duration_s

    def lines(self, name: str) -> Iterable[str]:
        total = 0
        for limit, count in zip([*(f"{limit:g}" for limit in self.limits_s), "+Inf"], self.counts, strict=True):
            total += count
            yield f'{name}_bucket{{le="{limit}"}} {total}'
        yield f"{name}_sum {self.sum_s:.6f}"
        yield f"{name}_count {total}"


@dataclass
class ServerMetrics:
    """Counts since the start; used by the event loop's thread alone."""

    #: how many answers wait and are computed
    counts_of_queue: Callable[[], tuple[int, int]]
    #: (path, status) -> requests
    requests: Counter[tuple[str, int]] = field(default_factory=Counter)
    #: tokens of the prompts that were taken, and tokens that clients were given
    num_prompt_tokens: int = 0
    num_new_tokens: int = 0
    #: answers that ended because their client had gone
    num_cancelled: int = 0
    #: from a request's arrival to its first token, and to the end of its reply
    first_token_s: SecondsHistogram = field(default_factory=lambda: SecondsHistogram(_SHORT_S))
    request_s: SecondsHistogram = field(default_factory=lambda: SecondsHistogram(_LONG_S))
    #: when the server started, in seconds since 1970
    _start_s: float = field(default_factory=time.time)

    def text(self) -> str:
        (num_waiting, num_running), lines = self.counts_of_queue(), []
        requests = [f'{{path="{path}",status="{status}"}} {n}' for (path, status), n in sorted(self.requests.items())]
        for name, kind, help_text, samples in (
            ("requests_total", "counter", "Requests by path and status.", requests),
            ("prompt_tokens_total", "counter", "Tokens of prompts that were taken.", [f" {self.num_prompt_tokens}"]),
            ("generated_tokens_total", "counter", "New tokens.", [f" {self.num_new_tokens}"]),
            ("cancelled_answers_total", "counter", "Answers whose client had gone.", [f" {self.num_cancelled}"]),
            ("answers_running", "gauge", "Answers that have a row of the KV cache.", [f" {num_running}"]),
            ("answers_waiting", "gauge", "Answers that wait for a row.", [f" {num_waiting}"]),
            ("start_time_seconds", "gauge", "When the server started.", [f" {self._start_s:.3f}"]),
        ):
            lines += [f"# HELP penstock_{name} {help_text}", f"# TYPE penstock_{name} {kind}"]
            lines += [f"penstock_{name}{sample}" for sample in samples]
        for name, help_text, histogram in (
            ("time_to_first_token_seconds", "From a request to its first token, streamed or not.", self.first_token_s),
            ("request_duration_seconds", "From a request to the end of its reply.", self.request_s),
        ):
            lines += [f"# HELP penstock_{name} {help_text}", f"# TYPE penstock_{name} histogram"]
            lines += histogram.lines(f"penstock_{name}")
        return "\n".join(lines) + "\n"

"""An exception that nobody catches in a user's script: told once by all ranks, on the caller's lines.

Python would print one traceback a rank, most of it inside the engine. Here the first rank that fails by itself prints
the one traceback, without the engine's own calls, and names the others in a line. The exception itself stays whole.
"""

import dis
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from traceback import FrameSummary, StackSummary, TracebackException, extract_tb
from types import TracebackType

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from penstock.parallel.host import answer_of_store
from penstock.runtime.errors import first_line, is_of_link
from penstock.runtime.liveness import numbers
from penstock.runtime.recovery import Recovery
from penstock.runtime.transport import default_store
from penstock.settings.declare import words_of

WHOLE = "PENSTOCK_TRACEBACK"
"""The environment variable that shows everything, on every rank."""

PATIENCE_S = 2.0
"""How long a rank waits for another whose failure came first, and that one for all that end because of it."""

# Long enough for an agent of torchrun to see the first process end, and for the store to outlive those that ask it.
_LINGER_S = 2.0

_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_COMMANDS = f"{_PACKAGE}cli{os.sep}"
_LIBRARIES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}", os.path.dirname(os.__file__) + os.sep)
# Of a deep recursion the first and the last calls.
_FIRST_CALLS, _LAST_CALLS = 4, 8
_MOST_OTHERS = 4
_MOST_QUOTED = 300
_POLL_S = 0.02
# Set by torchrun, whose agents' store outlives the ranks, and counts its restarts.
_AGENTS_STORE, _RESTARTS = "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT"


def tell(error: BaseException) -> None:
    """Print an exception that ends this process, as `sys.excepthook` is asked to; of several ranks one tells it."""
    ours = [trace for trace in _traces(error) if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE)]
    # Of what a command of the package meets the whole is wanted: no caller of it made a mistake.
    is_of_command = bool(ours) and ours[0].tb_frame.f_code.co_filename.startswith(_COMMANDS)
    if is_of_command or os.environ.get(WHOLE):
        sys.__excepthook__(type(error), error, error.__traceback__)
        return
    place = None
    with suppress(OSError, RuntimeError, ValueError, KeyError):
        place = _own_store()
    if place is None:
        sys.stderr.write("".join(shortened(error)))
        return
    store, rank, num_ranks = place
    text = tell_together(store, rank, num_ranks, error)
    sys.stderr.write(text)
    sys.stderr.flush()
    # The rank that has told ends first, for torchrun's report begins with it; or else the store's own rank ends last.
    has_agent = os.environ.get(_AGENTS_STORE) == str(True)
    if (has_agent and not text) or (not has_agent and rank == 0):
        time.sleep(_LINGER_S)


# ---- one exception, in the caller's lines


def shortened(error: BaseException) -> Iterator[str]:
    """The lines of an exception's traceback, with a run of the engine's own calls as one line.

    Where the engine raises one error because of another, such as a `StepError` because of a loss's own, both are one
    traceback: the caller's lines to the engine, and those of what it called.
    """
    if isinstance(error, BaseExceptionGroup):
        yield from TracebackException.from_exception(error).format()
        return
    inner = _inner_cause(error)
    # What was under way when it came is no reason of an interrupt.
    is_alone = error.__suppress_context__ or isinstance(error, KeyboardInterrupt)
    before = error.__cause__ or (None if is_alone else error.__context__)
    if before is not None and not _is_deliberate(error):
        yield from shortened(before)
        yield f"\n{'because of which' if error.__cause__ else 'and while that was handled'}:\n\n"
    yield "Traceback (most recent call last):\n"
    yield from _calls(_traces(error) if inner is None else [*_traces(error), *_traces(inner)], inner or error)
    if inner is not None:
        yield from TracebackException.from_exception(inner).format_exception_only()
        yield "which the engine raises as "
    yield from TracebackException.from_exception(error).format_exception_only()


def _calls(traces: Sequence[TracebackType], error: BaseException) -> Iterator[str]:
    """The lines of the calls that end with an error; of those that are not the caller's the number."""
    calls = StackSummary.extract(((trace.tb_frame, trace.tb_lineno) for trace in traces), limit=len(traces) or None)
    shown: list[bool] = []
    for number, call in enumerate(calls):
        # A library that the engine calls is no concern of the caller's, unless it is the last.
        later = calls[number:] if shown and not shown[-1] else ()
        is_between = any(_is_ours(other) or _is_of_user(other) for other in later)
        shown.append(not _is_ours(call) and (_is_of_user(call) or not is_between))
    if shown and not shown[-1] and not _is_deliberate(error):
        # A mistake of ours, and whoever reports it needs its line.
        shown[-1] = True
    for is_shown, run in groupby(zip(calls, shown), key=lambda call: call[1]):
        found = [call for call, _ in run]
        if not is_shown:
            yield f"  ... {len(found)} call{'s' * (len(found) > 1)} within Penstock ({WHOLE}=1 shows all)\n"
        elif len(found) <= _FIRST_CALLS + _LAST_CALLS:
            yield from StackSummary.from_list(found).format()
        else:
            yield from StackSummary.from_list(found[:_FIRST_CALLS]).format()
            yield f"  ... {len(found) - _FIRST_CALLS - _LAST_CALLS} calls ({WHOLE}=1 shows all)\n"
            yield from StackSummary.from_list(found[-_LAST_CALLS:]).format()


def _traces(error: BaseException) -> list[TracebackType]:
    found, trace = [], error.__traceback__
    while trace is not None:
        found.append(trace)
        trace = trace.tb_next
    return found


def _is_deliberate(error: BaseException) -> bool:
    """True for an error that the package raises by a statement, rather than meets."""
    traces = _traces(error)
    if not traces or not traces[-1].tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return False
    return traces[-1].tb_frame.f_code.co_code[traces[-1].tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _inner_cause(error: BaseException) -> BaseException | None:
    """The error of a user's own code, or of a library that it has called, because of which the engine raises this."""
    if error.__cause__ is None or not _is_deliberate(error):
        return None
    *_, last = _traces(error.__cause__) or [None]
    if last is None or last.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return _inner_cause(error.__cause__)
    return error.__cause__


def _is_ours(call: FrameSummary) -> bool:
    return call.filename.startswith(_PACKAGE)


def _is_of_user(call: FrameSummary) -> bool:
    if call.filename == "<string>" and call.name == "__init__":
        # A dataclass makes it.
        return False
    return not (call.filename.startswith((_PACKAGE, "<frozen ")) or any(part in call.filename for part in _LIBRARIES))


# ---- all ranks


def _own_store() -> tuple[Store, int, int] | None:
    """The store where this rank reaches the others, its rank and their number; None if it is alone or has none.

    A connection of its own: torch's serves one call at a time, and some thread may wait in it.
    """
    environ, store = os.environ, None
    rank, num_ranks = int(environ.get("RANK", "-1")), int(environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, num_ranks, store = dist.get_rank(), dist.get_world_size(), default_store()
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        store = store.clone() if num_ranks > 1 else None  # pyright: ignore[reportAttributeAccessIssue]
    elif rank >= 0 and num_ranks > 1 and environ.get(_AGENTS_STORE) == str(True):
        host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
        # torch itself would print a page for each attempt.
        socket.create_connection((host, port), PATIENCE_S).close()
        store = TCPStore(host, port, timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False)
    if store is None or hasattr(sys, "ps1"):
        return None
    return PrefixStore(f"penstock/uncaught/{environ.get(_RESTARTS, '0')}", store), rank, num_ranks


def tell_together(store: Store, rank: int, num_ranks: int, error: BaseException) -> str:
    """The text that this rank is to print, which for all but one rank is empty or a line."""
    own = _own_words(error, rank)
    if not own:
        _wait_for(store, "claimed", PATIENCE_S)
    claims: list[int] = []
    answer_of_store(lambda: claims.append(store.add("claims", 1)) is None, PATIENCE_S)
    if not claims:
        return "".join(shortened(error)) if own else f"penstock: rank {rank}: {first_line(error)}\n"
    if claims == [1]:
        answer_of_store(lambda: store.set("claimed", own) is None, PATIENCE_S)
        for recovery in list(Recovery.of_process) if own else ():
            recovery.leave(error)
        return "".join([*shortened(error), *_of_others(store, rank, num_ranks, own)])
    answer_of_store(lambda: store.set(f"of {rank}", own) is None and store.add("heard", 1) > 0, PATIENCE_S)
    _wait_for(store, "told", 2 * PATIENCE_S)

    def is_told() -> bool:
        told = rank in json.loads(store.get("told")) or store.get("claimed").decode() == own
        return told or store.add("late", 1) > _MOST_OTHERS

    is_known = not own or answer_of_store(is_told, PATIENCE_S)
    return "" if is_known else f"penstock: rank {rank} failed too: {own}\n"


def _wait_for(store: Store, key: str, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if answer_of_store(lambda: store.check([key]), PATIENCE_S, if_gone=True):
            return
        time.sleep(_POLL_S)


def _of_others(store: Store, rank: int, num_ranks: int, own: str) -> Iterator[str]:
    """A line for the ranks that end because of this one, one for those that fail alike, and one for each other one.

    Those count that end in time, and they are told of it.
    """
    deadline = time.monotonic() + PATIENCE_S
    heard: list[int] = [0]
    while heard[-1] < num_ranks - 1 and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        answer_of_store(lambda: heard.append(store.add("heard", 0)) is None, PATIENCE_S)
    by_text: dict[str, list[int]] = {}

    def read() -> bool:
        for other in range(num_ranks):
            if other != rank and store.check([f"of {other}"]):
                by_text.setdefault(store.get(f"of {other}").decode(), []).append(other)
        store.set("told", json.dumps([other for ranks in by_text.values() for other in ranks]))
        return True

    answer_of_store(read, PATIENCE_S)
    for text, verb in (("", "ended because of it"), (own, "failed in the same way")):
        if ranks := by_text.pop(text, []):
            yield f"penstock: {_ranks(ranks)} {verb}\n"
    for text, ranks in list(by_text.items())[:_MOST_OTHERS]:
        yield f"penstock: {_ranks(ranks)} failed too: {text}\n"
    if more := [rank for ranks in list(by_text.values())[_MOST_OTHERS:] for rank in ranks]:
        yield f"penstock: {_ranks(more)} failed too, each in another way\n"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {numbers(ranks)}"


def _own_words(error: BaseException, rank: int) -> str:
    """Type, message and place of an error in one line; nothing for one that tells of another rank or a lost link."""
    inner = _inner_cause(error)
    if isinstance(error, Exception) and inner is None:
        named = re.search(r"\brank (\d+)\b", words_of(error)) if _is_deliberate(error) else None
        if is_of_link(error) or (named is not None and int(named[1]) != rank):
            return ""
    errors = (error,) if inner is None else (error, inner)
    calls = [call for found in errors for call in extract_tb(found.__traceback__) if _is_of_user(call)]
    place = f" ({Path(calls[-1].filename).name}, line {calls[-1].lineno})" if calls else ""
    return f"{type(error).__name__}: {first_line(error)[:_MOST_QUOTED]}{place}"

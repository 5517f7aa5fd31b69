"""Small host-side values between ranks, and errors that one rank raises for all.

Values travel as JSON and tensors as bytes: nothing from a peer is ever unpickled. Every `group` here carries host
memory (gloo); None stands for a rank that is alone.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from penstock import __version__
from penstock.parallel.nested import pack, tensor_forms, unpack
from penstock.parallel.tensor_slice import laid_out
from penstock.settings import ConfigError, differences
from penstock.settings.declare import words_of

T = TypeVar("T")

Members = dist.ProcessGroup | Callable[[Any], list[Any]] | None
"""The ranks among which values are gathered: a group, or where there is none yet what gathers them by other means."""

_LENGTH = struct.Struct("<q")
_KIND_BYTES, _ROW_BYTES = 8, 128


class ProcessEnded(RuntimeError):
    """A process has ended, or does not answer, before all have made their engine; the message names its rank."""


class DifferentCalls(RuntimeError):
    """Ranks are in different calls, such as one in `save` and the others in `train_batch`."""


def answer_of_store(
    question: Callable[[], bool], limit_s: float, *, if_gone: bool = False, if_silent: bool = False
) -> bool:
    """Ask the store in a thread, for at most `limit_s`: it may be gone, or silent since the network to it is cut."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(question())
        except RuntimeError:
            answers.append(if_gone)

    thread = threading.Thread(target=ask, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        # From Python 3.12 on no thread starts where the interpreter ends.
        ask()
    else:
        thread.join(limit_s)
    return answers[0] if answers else if_silent


def on_all_ranks(act: Callable[[], T], group: Members, *kinds: type[Exception], **settings: Any) -> T:
    """Act, and raise on all ranks if any rank's act raised, as `gather_on_all_ranks`; returns this rank's result."""
    results: list[T] = []
    gather_on_all_ranks(lambda: results.append(act()), group, *kinds, **settings)
    return results[0]


def gather_on_all_ranks(
    act: Callable[[], Any],
    group: Members,
    *kinds: type[Exception],
    otherwise: type[Exception] = RuntimeError,
    catch: type[Exception] = Exception,
    message: str = "rank {rank}: {error}",
    within: AbstractContextManager[Any] | None = None,
) -> list[Any]:
    """Act, give every rank the list of all ranks' results, which JSON can hold, and raise on all if any act raised.

    `message` may name the failing `{rank}`, its `{error}`, and the `{kind}` of that error. Errors that are not of the
    type `catch` pass through at once, unknown to other ranks. Results are gathered `within` a context, such as a
    recorder's `collective`.

    Raises: the act's own error on this rank. On other ranks, for the first rank whose act raised, the first of `kinds`
    that its error is an instance of, or else `otherwise`.
    """
    error: Exception | None = None
    result = None
    try:
        result = act()
    except catch as caught:
        error = caught
    number = next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
    with within or nullcontext():
        views = gather_json([result, None if error is None else [number, type(error).__name__, words_of(error)]], group)
    if error is not None:
        raise error
    for rank, (_, failure) in enumerate(views):
        if failure is not None:
            number, kind, text = failure
            raised = (*kinds, otherwise)[number](message.format(rank=rank, kind=kind, error=text))
            raised.is_of_other_rank = True  # pyright: ignore[reportAttributeAccessIssue]
            raise raised
    return [result for result, _ in views]


def refuse_other_software(group: Members) -> None:
    """Refuse hosts that compute with another Penstock or torch: numbers, messages and files may differ.

    Raises: ConfigError on all ranks alike, with each version that differs.
    """
    views = gather_json({"penstock": __version__, "torch": torch.__version__}, group)
    for rank, view in enumerate(views):
        if changed := differences(view, views[0], f"on rank {rank}", "on rank 0"):
            raise ConfigError(
                f"all hosts of a run need the same versions, but these differ: {'; '.join(changed)}; install the same "
                "on all"
            )


def meet(group: dist.ProcessGroup | None) -> None:
    """Wait until all ranks of the group are here, which raises on each where one has failed on its way."""
    gather_json(None, group)


def gather_json(value: Any, group: Members) -> list[Any]:
    """Give every rank the list of all ranks' values, in the order of the group's ranks.

    `value` is anything JSON can hold; it comes back as JSON reads it (tuples as lists, keys as strings).
    """
    if callable(group):
        return group(value)
    text = json.dumps(value).encode()
    lengths = gather_rows("values", _LENGTH.pack(len(text)), group)
    longest = max(length for row in lengths for length in _LENGTH.unpack(row))
    return [json.loads(theirs) for theirs in _gather(text.ljust(longest), group)]


def gather_rows(kind: str, row: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Give every rank the list of all ranks' rows, by rank, in one small collective; all are equally long.

    Rows of every `kind` travel in the same form, so that ranks which are in different calls find out.

    Raises: DifferentCalls on all ranks if they gather rows of different kinds.
    """
    tagged = (kind.encode().ljust(_KIND_BYTES) + row).ljust(_ROW_BYTES)
    assert len(tagged) == _ROW_BYTES, f"a row of {len(row)} bytes is too long"
    rows = _gather(tagged, group)
    kinds = [other_row[:_KIND_BYTES].decode().rstrip() for other_row in rows]
    if other := next((rank for rank, other_row in enumerate(kinds) if other_row != kinds[0]), None):
        raise DifferentCalls(
            f"all ranks make the same calls in the same order, but rank 0 shows its {kinds[0]} and rank {other} its "
            f"{kinds[other]}: train_batch, evaluate and forward begin with a batch, save, load and others with values"
        )
    return [other_row[_KIND_BYTES : _KIND_BYTES + len(row)] for other_row in rows]


def _gather(row: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    if group is None:
        return [row]
    sent = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(rows, sent, group=group)
    return [received.numpy().tobytes() for received in rows]


def check_portable(value: Any) -> None:
    """Refuse a value that `broadcast_value` cannot send.

    Raises: `TypeError` naming the type, and the possible ones.
    """
    pack(value)


def broadcast_value(value: Any, source: int, group: dist.ProcessGroup | None) -> Any:
    """Give every rank of the group the value of rank `source`: numbers, text, tensors, lists and mappings of them.

    On other ranks `value` is ignored. Tensors travel through host memory and arrive there. The source gets what all
    others do: subclasses of tuples, lists and mappings arrive as plain ones.

    Raises: `TypeError` on the source, before anything is sent, for a value that cannot be: call `check_portable` first.
    """
    if group is None:
        return value
    is_source = group.rank() == source
    structure, tensors = pack(value) if is_source else (None, [])
    text = json.dumps(structure).encode() if is_source else b""
    length = torch.tensor([len(text)])
    dist.broadcast(length, group=group, group_src=source)
    packed = (
        torch.frombuffer(bytearray(text), dtype=torch.uint8)
        if is_source
        else torch.empty(int(length), dtype=torch.uint8)
    )
    dist.broadcast(packed, group=group, group_src=source)
    structure = json.loads(packed.numpy().tobytes())
    if is_source:
        tensors = [laid_out(tensor.cpu()) for tensor in tensors]
    else:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in tensor_forms(structure)]
    for tensor in tensors:
        if tensor.numel():
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=group, group_src=source)
    return unpack(structure, tensors)

"""Faults of the kind that a quick network hides: each takes one care out of the package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from penstock import Layout
from penstock.engine.checkpoint import Checkpointer
from penstock.parallel.collectives import Collectives, Pending
from penstock.parallel.gradients import GradientBuckets
from penstock.runtime import DistributedTransport, Executor, Message, Stage
from penstock.runtime.transport import _HeldSends, _PostedReceive, _Sent
from penstock.schedule import Action, Op
from tests.late.jobs import Job, Part, schedule

PIPELINE = Job(Layout(pp=2), schedule("1f1b"))
REPLICAS = Job(Layout(dp=2), schedule("1f1b"))
SHARDED = Job(Layout(dp=2), schedule("1f1b"), zero=True)
TENSORS = Job(Layout(tp=2), schedule("1f1b"))
EXPERTS = Job(Layout(dp=2, ep=2), schedule("combined"), sparse=True)
GENERATION = Job(Layout(pp=2), schedule("1f1b"), (Part.GENERATE,))
UNPACKED = Job(Layout(dp=2), schedule("1f1b"), (Part.GENERATE,), zero=True, packed=False)
SAVING = Job(Layout(dp=2), schedule("1f1b"), (Part.SAVE,))
CROSSED = Job(Layout(dp=2, cp=2), schedule("1f1b"))


@dataclass(frozen=True)
class Fault:
    """One fault: what it puts in place of a function, on which job it is planted, and the words it is found by.

    `words` are of the error, or "differs" where the outcome shows it.
    """

    of: Any
    name: str
    instead: Callable[..., Any]
    job: Job
    words: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inside, the package has the fault."""
        original = getattr(self.of, self.name)
        with mock.patch.object(self.of, self.name, lambda *args, **named: self.instead(original, *args, **named)):
            yield


def _no_wait(original: Any, pending: Pending[Tensor]) -> Tensor:
    return pending.finish()


def _no_wait_for_message(original: Any, receipt: _PostedReceive) -> Message:
    receipt.transport._num_awaited -= 1
    return Message(tuple(receipt.buffers))


def _nothing(original: Any, *args: Any) -> None:
    pass


def _forget_tensor(original: Any, sends: _HeldSends, sent: _Sent) -> None:
    original(sends, ([torch.empty(0)], sent[1]) if sends.are_polled else sent)


def _forget_header(original: Any, sends: _HeldSends, sent: _Sent) -> None:
    original(sends, sent if sends.are_polled else ([torch.empty(0)], sent[1]))


def _free_before_wait(original: Any, sends: _HeldSends) -> None:
    while sends._in_flight:
        works = sends._in_flight.popleft()[1]
        for work in works:
            work.wait()


def _send_from_one_buffer(original: Any, transport: DistributedTransport, channel: Any, message: Message) -> None:
    [tensor] = message.tensors
    buffers = transport.__dict__.setdefault("buffers", {})
    buffer = buffers.setdefault((channel, tensor.dtype), torch.empty(1 << 12, dtype=tensor.dtype))
    original(transport, channel, Message((buffer[: tensor.numel()].view(tensor.shape).copy_(tensor),)))


def _forget_input(original: Any, collectives: Collectives, kind: Any, work: Any, x: Tensor, finish: Any) -> Any:
    return original(collectives, kind, work, torch.empty(0), finish)


def _write_to_input(original: Any, collectives: Collectives, x: Tensor, *splits: Any) -> Any:
    handle = original(collectives, x, *splits)
    x.data.add_(1)
    return handle


def _zero_at_once(original: Any, buckets: GradientBuckets) -> None:
    original(buckets)
    for bucket in buckets.buckets:
        bucket.gradients.zero_()


def _reduce_before_last_backward(original: Any, executor: Executor, *args: Any, **named: Any) -> None:
    original(executor, *args, **named)
    steps = executor._steps
    first = next(n for n, (step, _) in enumerate(steps) if isinstance(step, Action) and step.op is Op.REDUCE_GRAD)
    steps.insert(first - 1, steps.pop(first))


def _send_one_later(original: Any, transport: DistributedTransport, channel: Any, message: Message) -> None:
    waiting = transport.__dict__.setdefault("waiting", [])
    waiting.append((channel, message))
    # The links' test sends whole numbers.
    if len(waiting) > 1 or not message.tensors[0].is_floating_point():
        original(transport, *waiting.pop(0))


def _skip_on_one_rank(original: Any, buckets: GradientBuckets) -> None:
    if dist.get_rank() == 0:
        original(buckets)


def _cross_groups(original: Any, buckets: GradientBuckets) -> None:
    """Half of the ranks sum gradients before a sum over their cp group, the others after it."""
    other = next(group for group in dist.distributed_c10d._world.pg_map if _is_pair_on_device(group))
    beside = Collectives(other)
    first = None if dist.get_rank() in (0, 3) else beside.all_reduce(torch.ones(1))
    original(buckets)
    buckets._pending.append(first or beside.all_reduce(torch.ones(1)))


def _is_pair_on_device(group: Any) -> bool:
    return group.size() == 2 and not group.on_host


def _decode_at_once(original: Any, stage: Stage, *args: Any) -> Tensor:
    with mock.patch.object(stage, "wait_for_weights", lambda: None):
        return original(stage, *args)


def _no_copy(original: Any, checkpointer: Checkpointer, name: str, tensor: Tensor) -> Tensor:
    return tensor.detach()


def _other_collective(original: Any, collectives: Collectives, x: Tensor) -> Any:
    return original(collectives, x) if collectives.rank == 0 else collectives.all_gather(x)


FAULTS = {
    "no collective is waited for": Fault(Pending, "wait", _no_wait, EXPERTS, "overflowed|Overflow when unpacking"),
    "a sum over tensor-parallel ranks is not waited for": Fault(Pending, "wait", _no_wait, TENSORS, "differs"),
    "no received message is waited for": Fault(_PostedReceive, "wait", _no_wait_for_message, PIPELINE, "test failed"),
    "gradients are read before they are summed": Fault(
        GradientBuckets, "wait", _nothing, REPLICAS, "wrote to what all-reduce .* was to fill"
    ),
    "parameters are read before they are gathered": Fault(GradientBuckets, "settle", _nothing, SHARDED, "differs"),
    "tokens are computed before parameters are gathered": Fault(
        Stage, "decode", _decode_at_once, UNPACKED, "logits .* are not finite"
    ),
    "a tensor is freed before it is sent": Fault(_HeldSends, "add", _forget_tensor, PIPELINE, "freed what it gave"),
    "a header is freed before it is sent": Fault(_HeldSends, "add", _forget_header, GENERATION, "freed what it gave"),
    "a tensor is freed before its send is waited for": Fault(
        _HeldSends, "settle", _free_before_wait, PIPELINE, "freed what it gave to the"
    ),
    "messages are sent from one buffer": Fault(
        DistributedTransport, "send", _send_from_one_buffer, PIPELINE, "rank [01] wrote to what it gave to the"
    ),
    "the input of a collective is freed": Fault(Collectives, "_launched", _forget_input, SHARDED, "freed what it gave"),
    "the input of an exchange is written to": Fault(
        Collectives, "all_to_all", _write_to_input, EXPERTS, "wrote to what it gave to all-to-all among ranks 0 and 1"
    ),
    "gradients are set to zero while they are summed": Fault(
        GradientBuckets,
        "launch",
        _zero_at_once,
        REPLICAS,
        "wrote to what all-reduce .* was to fill",
    ),
    "a backward follows the sum of its gradients": Fault(
        Executor,
        "__init__",
        _reduce_before_last_backward,
        REPLICAS,
        "wrote to what all-reduce .* was to fill",
    ),
    "each message waits for the next": Fault(
        DistributedTransport, "send", _send_one_later, PIPELINE, "no rank can go on: .* has not launched"
    ),
    "one rank takes no part in a sum": Fault(
        GradientBuckets, "launch", _skip_on_one_rank, REPLICAS, "no rank can go on: .*rank 1 has not launched"
    ),
    "two groups are crossed": Fault(
        GradientBuckets,
        "launch",
        _cross_groups,
        CROSSED,
        "among ranks 0 and 1 and 2 and 3, number 1, which stands behind all-reduce of 1 among ranks 0 and 1",
    ),
    "ranks launch different collectives": Fault(
        Collectives, "sum_gradients", _other_collective, REPLICAS, "launches all-.* where another rank launches all-"
    ),
    "a checkpoint is written from live weights": Fault(Checkpointer, "_copy_to_host", _no_copy, SAVING, "differs"),
}

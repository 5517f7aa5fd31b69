"""A world of ranks in one process whose torch.distributed, transport and threads are those of `Operations`.

The package is entered at four places: the function that makes a group, the class of a link and what makes its backend,
and the threads and queues of the two modules whose threads talk to other ranks. torch.distributed's own functions stay.
A step that fails on one rank ends the world, so there is no recovery.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from penstock.engine import pipeline as pipeline_module
from penstock.engine.checkpoint import checkpointer as save_module
from penstock.engine.generation.generator import Generator
from penstock.parallel import Grid
from penstock.parallel import grid as grid_module
from penstock.parallel.renewable import RenewableGroup
from penstock.runtime import Recovery
from penstock.runtime import transport as transport_module
from penstock.runtime.decode import relay as relay_module
from penstock.runtime.transport import HostChannel, Line, describe_message
from tests.late.operations import Call, Combine, Lateness, LateWork, Operations
from tests.late.turns import QueueInTurn, ThreadInTurn

T = TypeVar("T")
Tensors = Sequence[Tensor]

_BACKEND = "late"
_HOST_GROUPS = ("control", "background", "pp_control", "batch_control", "model_control")

_running: list[Operations] = []
"""Those of the world that runs: torch.distributed makes groups by a function that it gives nothing of ours."""


def run(size: int, function: Callable[..., T], *args: Any, lateness: Lateness) -> list[T]:
    """Call `function(rank, *args)` on ranks in threads, and return their results by rank.

    Raises: the first error of any rank; `Misuse` of a tensor; `Deadlock`.
    """
    operations, store = Operations(lateness), HashStore()

    def main(rank: int) -> T:
        dist.init_process_group(_BACKEND, rank=rank, world_size=size, store=store)
        world = threaded.ThreadLocalWorld._world.world
        operations.turns.enter[rank] = partial(setattr, threaded.ThreadLocalWorld._world, "world", world)
        return function(rank, *args)

    with _installed(operations):
        return operations.turns.run([partial(main, rank) for rank in range(size)])


@contextmanager
def _installed(operations: Operations) -> Iterator[None]:
    if not hasattr(dist.Backend, _BACKEND.upper()):
        dist.Backend.register_backend(_BACKEND, _new_group, extended_api=True, devices=["cpu"])
    turns = operations.turns
    threads = types.SimpleNamespace(Thread=partial(_thread, turns))
    queues = types.SimpleNamespace(SimpleQueue=_Queues(turns))
    with ExitStack() as stack:
        for module, name, ours in (
            (grid_module, "new_renewable_group", lambda ranks, *_: dist.new_group(list(ranks), backend=_BACKEND)),
            (pipeline_module, "connect", partial(_connect, pipeline_module.connect)),
            (pipeline_module, "Recovery", lambda group, *rest: Recovery(None, *rest)),
            (transport_module, "_backend_maker", lambda group, *_: partial(LateEnd, operations, group)),
            (transport_module, "_ChannelEnd", LateLink),
            (relay_module, "threading", threads),
            (relay_module, "queue", queues),
            (save_module, "threading", threads),
            # Python 3.11 holds a lock of the class meanwhile, which another rank's thread would wait for.
            (Generator.__dict__["ring"], "lock", nullcontext()),
        ):
            stack.enter_context(mock.patch.object(module, name, ours, create=True))
        _running.append(operations)
        stack.callback(_running.pop)
        isolate = getattr(torch._C, "_distributed_c10d")._set_thread_isolation_mode  # noqa: B009
        isolate(True)
        stack.callback(isolate, False)
        threaded._install_threaded_pg()
        stack.callback(threaded._uninstall_threaded_pg)
        yield


def _connect(connect: Callable[..., Grid], *args: Any) -> Grid:
    grid = connect(*args)
    for name in _HOST_GROUPS:
        group = getattr(grid, name)
        if group is not None:
            group.on_host = True
    return grid


def _thread(
    turns: Any, target: Callable[..., None], args: Sequence[Any] = (), name: str = "", daemon: bool = True
) -> Any:
    return ThreadInTurn(turns, target, args, name)


class _Queues:
    """Makes queues, as `queue.SimpleQueue[T]()` does."""

    def __init__(self, turns: Any) -> None:
        self._turns = turns

    def __getitem__(self, item: Any) -> _Queues:
        return self

    def __call__(self) -> QueueInTurn[Any]:
        return QueueInTurn(self._turns)


# ---- groups


def _new_group(made: Any, options: Any) -> LateGroup:
    return LateGroup(_running[-1], made.group_id, made.global_ranks_in_group, made.group_rank, made.group_size)


class LateGroup(RenewableGroup):
    """A group of the running world; its operations are of the device unless `on_host`."""

    def __init__(self, operations: Operations, name: str, ranks: Sequence[int], place: int, size: int) -> None:
        #: the ranks of the group in the world
        self.ranks = tuple(ranks) or tuple(range(size))
        #: True for a group on host memory
        self.on_host = False
        self._operations, self._name, self._place = operations, name, place
        super().__init__(HashStore(), place, size, lambda store, replaced: None)

    def renew(self, generation: int) -> None:
        self.backend = self.inner = mock.Mock()

    def _launch(self, kind: str, combine: Combine, inputs: Tensors, outputs: Tensors, argument: Any = None) -> LateWork:
        stream = ("host", self._name) if self.on_host else "device"
        name = f"{kind} among ranks {' and '.join(map(str, self.ranks))}, number"
        call = Call(
            (self._name, self.ranks), stream, kind, name, self.ranks, self._place, combine, inputs, outputs, argument
        )
        return self._operations.launch(call)

    # ---- as torch.distributed calls them

    def allreduce(self, tensors: Tensors, options: Any) -> LateWork:
        kind = f"all-reduce of {tensors[0].numel()}"
        return self._launch(kind, partial(_all_reduced, options.reduceOp), tensors, tensors)

    def reduce(self, tensors: Tensors, options: Any) -> LateWork:
        root, kind = options.rootRank, f"reduce of {tensors[0].numel()} to {options.rootRank}"
        return self._launch(kind, partial(_reduced, options.reduceOp, root), tensors, tensors)

    def broadcast(self, tensors: Tensors, options: Any) -> LateWork:
        root = options.rootRank
        given, filled = (tensors, ()) if self._place == root else ((), tensors)
        return self._launch(f"broadcast from {root}", partial(_broadcast, root), given, filled)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, options: Any) -> LateWork:
        return self._launch("all-gather", _gathered, inputs, outputs[0])

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any) -> LateWork:
        return self._launch("all-gather", _gathered_flat, [own], [output])

    def all_to_all_single(
        self, output: Tensor, own: Tensor, received: list[int] | None, sent: list[int] | None, options: Any
    ) -> LateWork:
        lengths = sent or [own.shape[0] // self.size()] * self.size()
        return self._launch("all-to-all", _all_to_all, [own], [output], lengths)

    def send_receive(self, sent: Tensor, to: int, arrived: Tensor, source: int) -> list[Any]:
        return [self._launch("send and receive", _ring, [sent], [arrived], to)]


# Older releases of PyTorch have other names for these two.
setattr(LateGroup, "_allgather_base", LateGroup.all_gather_single)  # noqa: B010
setattr(LateGroup, "alltoall_base", LateGroup.all_to_all_single)  # noqa: B010


def _summed(how: Any, inputs: Sequence[Tensors]) -> Tensor:
    total = inputs[0][0].clone()
    for (other,) in inputs[1:]:
        if how == dist.ReduceOp.SUM:
            total += other
        else:
            assert how == dist.ReduceOp.MAX, f"no reduction by {how} here"
            total = torch.maximum(total, other)
    return total


def _all_reduced(how: Any, inputs: Sequence[Tensors], _: Sequence[Any]) -> Sequence[Tensors]:
    return [[_summed(how, inputs)]] * len(inputs)


def _reduced(how: Any, root: int, inputs: Sequence[Tensors], _: Sequence[Any]) -> Sequence[Tensors]:
    total = _summed(how, inputs)
    undefined = torch.full_like(total, torch.nan if total.is_floating_point() else -1)
    return [[total if place == root else undefined] for place in range(len(inputs))]


def _broadcast(root: int, inputs: Sequence[Tensors], _: Sequence[Any]) -> Sequence[Tensors]:
    return [() if place == root else inputs[root] for place in range(len(inputs))]


def _gathered(inputs: Sequence[Tensors], _: Sequence[Any]) -> Sequence[Tensors]:
    return [[own for (own,) in inputs]] * len(inputs)


def _gathered_flat(inputs: Sequence[Tensors], _: Sequence[Any]) -> Sequence[Tensors]:
    return [[torch.cat([own for (own,) in inputs])]] * len(inputs)


def _all_to_all(inputs: Sequence[Tensors], lengths: Sequence[list[int]]) -> Sequence[Tensors]:
    parts = [own.split(sent) for (own,), sent in zip(inputs, lengths, strict=True)]
    return [[torch.cat([part[place] for part in parts])] for place in range(len(inputs))]


def _ring(inputs: Sequence[Tensors], targets: Sequence[int]) -> Sequence[Tensors]:
    by_place = {to: given for given, to in zip(inputs, targets, strict=True)}
    return [by_place[place] for place in range(len(inputs))]


# ---- links


class LateEnd:
    """One end of a link, as a backend of two ranks."""

    #: the link, known once it has been made
    line: Line
    number: int

    def __init__(self, operations: Operations, group: LateGroup, store: Any, place: int) -> None:
        self._operations, self._group, self._place = operations, group, place

    def open(self, line: Line) -> None:
        """Become an end of this line; the n-th on one rank is the n-th on the other."""
        made = self._operations.num_links
        rank = self._group.ranks[line.source if self._place == 0 else line.destination]
        self.line, self.number = line, made[self._group.ranks, line, rank]
        made[self._group.ranks, line, rank] += 1

    def _launch(self, inputs: Tensors, outputs: Tensors) -> LateWork:
        key, line = (self._group.ranks, self.line, self.number), self.line
        places = self._group.ranks[line.source], self._group.ranks[line.destination]
        call = Call(
            key, key, "message", f"the {describe_message(line)}, number", places, self._place, _passed, inputs, outputs
        )
        return self._operations.launch(call)

    def send(self, tensors: Tensors, peer: int, tag: int) -> LateWork:
        work = self._launch(tensors, ())
        if self._operations.lateness.blocking_sends and not isinstance(self.line, HostChannel):
            work.wait_for_all()
        return work

    def recv(self, tensors: Tensors, peer: int, tag: int) -> LateWork:
        return self._launch((), tensors)


def _passed(inputs: Sequence[Tensors], _: Sequence[Any]) -> Sequence[Tensors]:
    return [(), inputs[0]]


class LateLink(transport_module._ChannelEnd):
    """A link whose ends are late, and whose sends are polled, as on a GPU."""

    def __init__(
        self, channel: Line, rank: int, store: Any, makers: Sequence[Callable[[Any, int], LateEnd]], watch_s: object
    ) -> None:
        super().__init__(channel, rank, store, makers, None)
        for end in self.backends:
            end.open(channel)

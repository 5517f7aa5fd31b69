"""Names in torch's profiler: of actions and layers, recorded only while a profiler is active."""

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch.profiler import record_function

from penstock.schedule.recording import Record


def profiler_is_active() -> bool:
    """True while a profiler of torch's records this thread."""
    return torch._C._autograd._profiler_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def named_handler(name: str, handler: Callable[[Record], Any]) -> Callable[[Record], Generator[Any, None, None]]:
    """The handler of an action, which carries the name in the profile."""

    def run(record: Record) -> Generator[Any, None, None]:
        with record_function(name):
            waiting = handler(record)
            if waiting is not None:
                yield from waiting

    return run


def named_context(name: str, context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """The context, which carries the name in the profile if a profiler is active."""
    if not profiler_is_active():
        return context()
    stack = ExitStack()
    stack.enter_context(record_function(name))
    stack.enter_context(context())
    return stack

"""CUDA graphs on a CPU: operations are captured as they run, and a replay runs them again on the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Graph:
    """Stands for `torch.cuda.CUDAGraph`; whatever Python decided while it captured stays as it was."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def replay(self) -> None:
        for func, args, kwargs, before in self.calls:
            for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def reset(self) -> None:
        self.calls.clear()


class _Capture(TorchDispatchMode):
    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.graph.calls.append((func, args, kwargs or {}, result))
        return result


def on_the_cpu(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    """Have graphs be captured on the CPU, and each noted among the events."""

    @contextmanager
    def graph(graph: Graph, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        events.append("capture")
        with _Capture(graph):
            yield

    @contextmanager
    def within(stream: object) -> Iterator[None]:
        yield

    def stream() -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    names = {"CUDAGraph": Graph, "graph": graph, "Stream": stream, "stream": within, "current_stream": stream}
    for name, value in {**names, "graph_pool_handle": object}.items():
        monkeypatch.setattr(torch.cuda, name, value)

"""A watch over an optimizer's steps, which sees if it steps parameters jointly."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

_Row = tuple[list[Tensor], list[Tensor], list[Tensor]]
"""Tensors that an operation computes with, those of them that it writes, and those that it gives."""
_OF_NO_VALUE = ("_like", "new_", "lift_fresh", "empty", "zeros", "ones", "full", "scalar_tensor")
_SETS = ("copy_", "zero_", "fill_")
_READS = ("_local_scalar_dense", "is_nonzero", "equal")
_READS_WITHOUT_OPERATION = (Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__dlpack__)
_SETS_MEMORY = Tensor.data.__set__  # type: ignore[attr-defined]


class Origins(TorchDispatchMode):
    """Follows, in the steps that are taken within its context, from which parameters each tensor is computed.

    Two parameters meet where an operation has values of both, or where a value of one was read by the host and another
    is written before the one that it was read of. What compiled functions do inside is not seen, nor what a number that
    the host has read is used for.
    """

    #: the names of two parameters that meet; None if none do
    joined: tuple[str, str] | None
    #: sees what is no operation
    _calls: _Calls
    #: the names of parameters by identity
    _names: Mapping[int, str]
    #: the first byte of each parameter, its end, and its name; gradients may be gone before the step is over
    _spans: list[tuple[int, int, str]]
    #: first byte of a storage -> that storage, and the parameters from which its values were computed
    _of: dict[int, tuple[StorageWeakRef, frozenset[str]]]
    #: parameters of which the host has read a value, and that were not written since
    _read: set[str]
    #: the first bytes of the spans
    _starts: list[int]

    def __init__(self) -> None:
        super().__init__()
        self._of, self._calls = {}, _Calls(self)

    def begin(self, parameters: Mapping[str, nn.Parameter], state: Mapping[Any, Any]) -> None:
        """Begin a step of these parameters, by name, with this state; what is known of tensors from before stays."""
        self.joined, self._read, self._spans = None, set(), []
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            if parameter.numel():
                start = parameter.data_ptr()
                self._spans.append((start, start + parameter.nbytes, name))
        self._spans.sort()
        self._starts = [span[0] for span in self._spans]
        self._of = {start: noted for start, noted in self._of.items() if not noted[0].expired()}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self._note(parameter.grad, frozenset({name}))
            for tensor in _dense(state.get(parameter, {})):
                # One that came from a checkpoint; a single number there is the count of steps.
                if tensor.numel() > 1 and tensor.untyped_storage().data_ptr() not in self._of:
                    self._note(tensor, frozenset({name}))

    def __enter__(self) -> Origins:
        super().__enter__()
        self._calls.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._calls.__exit__(*error)
        super().__exit__(*error)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: compiled functions run as they do without this."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.joined is None and hasattr(func, "_schema"):
            name = func._schema.name.split("::")[-1]
            for row in _rows(func, name, args, kwargs or {}, result):
                self._follow(name, *row)
        return result

    def read(self, tensor: Tensor, is_writable: bool) -> None:
        """Note that the host has a tensor's values, to which it may write."""
        self._follow(_READS[0], [tensor], [tensor] if is_writable and self._span(tensor) is not None else [], [])
        self._read |= self._origins([tensor])

    def move(self, parameter: Tensor, values: Tensor) -> None:
        """Note that a parameter has these values, in their memory, from now on."""
        if (name := self._names.get(id(parameter))) is not None:
            self._read.discard(name)
            self._meet(self._origins([values]) | self._read | {name})
            self._note(values, frozenset({name}))

    def _meet(self, origins: frozenset[str]) -> None:
        if len(origins) > 1 and self.joined is None:
            first, second, *_ = sorted(origins)
            self.joined = first, second

    def _follow(self, name: str, used: list[Tensor], written: list[Tensor], given: list[Tensor]) -> None:
        origins = frozenset[str]() if any(part in name for part in _OF_NO_VALUE) else self._origins(used)
        if name in _READS:
            self._read |= origins
        if name in _SETS:
            origins = self._origins(used[1:])
        for tensor in written:
            if (span := self._span(tensor)) is not None:
                self._read.discard(span[2])
                origins |= {span[2]} | self._read
        for tensor in (*written, *given):
            self._note(tensor, origins)
        self._meet(origins)

    def _origins(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        found: set[str] = set()
        for tensor in tensors:
            if (span := self._span(tensor)) is not None:
                found.add(span[2])
            elif (noted := self._of.get(tensor.untyped_storage().data_ptr())) is not None and not noted[0].expired():
                found |= noted[1]
        return frozenset(found)

    def _note(self, tensor: Tensor, origins: frozenset[str]) -> None:
        """Note from which parameters a tensor was computed; one that lies in a parameter is that parameter's."""
        if self._span(tensor) is None:
            storage = tensor.untyped_storage()
            self._of[storage.data_ptr()] = StorageWeakRef(storage), origins

    def _span(self, tensor: Tensor) -> tuple[int, int, str] | None:
        """The parameter in which a tensor lies."""
        start = tensor.data_ptr()
        index = bisect_right(self._starts, start) - 1
        return self._spans[index] if index >= 0 and start < self._spans[index][1] else None


class _Calls(TorchFunctionMode):
    """Sees the calls that give values to the host, or memory to a parameter, without an operation."""

    #: to which they are reported
    _origins: Origins

    def __init__(self, origins: Origins) -> None:
        super().__init__()
        self._origins = origins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS_WITHOUT_OPERATION:
            self._origins.read(args[0], is_writable=func is not Tensor.tolist)
        elif func == _SETS_MEMORY:
            self._origins.move(*args)
        return func(*args, **(kwargs or {}))


def _dense(values: Any) -> Iterator[Tensor]:
    """The plain tensors in a value, as deep as they lie."""
    if values is None or isinstance(values, int | float | str):
        return
    if isinstance(values, Tensor) and is_traceable_wrapper_subclass(values):
        yield from _dense([getattr(values, name) for name in values.__tensor_flatten__()[0]])  # type: ignore[attr-defined]
    elif isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _dense(list(values.values()))
    elif isinstance(values, Iterable):
        for value in values:
            yield from _dense(value)


def _rows(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> Iterator[_Row]:
    """Tensors of an operation; of one over lists of tensors, a row for each place in them."""
    schema = func._schema.arguments
    given = [*zip(schema, args), *((own, kwargs[own.name]) for own in schema if own.name in kwargs)]
    written = [value for own, value in given if own.alias_info is not None and own.alias_info.is_write]
    values = [value for _, value in given]
    if not name.startswith(("_foreach_", "_fused_")):
        yield list(_dense(values)), list(_dense(written)), list(_dense(result))
        return
    for place in range(len(values[0])):
        used = [value[place : place + 1] if _is_row(value, values[0]) else value for value in values]
        made = [[value[place] for value in lists if _is_row(value, values[0])] for lists in (written, [result])]
        yield list(_dense(used)), list(_dense(made[0])), list(_dense(made[1]))


def _is_row(value: Any, first: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == len(first)

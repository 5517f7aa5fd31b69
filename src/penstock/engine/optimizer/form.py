"""The state that an optimizer of a user's own keeps, as named tensors and one text that says how they hang together."""

from __future__ import annotations

import copy
import json
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FORM = "form"
"""The kind of state that is the text, as bytes."""
MASTER = "master"
"""The kind of state that is the fp32 copy of a 16-bit parameter."""
STATE = "optimizer."
"""Begins the name of each tensor of state: ``optimizer.<kind>.<parameter>``."""
GROUP, OPTIMIZER = "group ", "optimizer "
"""Begin what stands for the parameter in the name of what an optimizer keeps of a whole group, or of all parameters."""
_PLAIN = (type(None), bool, int, float, str)
_ROWS: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


class NoForm(ValueError):
    """A value is none that a checkpoint can hold."""

    #: the part of it that is not
    value: Any
    #: the key of the value that it is a part of
    key: Any = None

    def __init__(self, value: Any) -> None:
        super().__init__(f"{type(value).__name__} has no form in a checkpoint")
        self.value = value


def state_name(name: str) -> tuple[str, str]:
    """Kind and owner of a tensor of state, from its name."""
    _, kind, owner = name.split(".", 2)
    return kind, owner


def is_of_all(owner: str) -> bool:
    """True if that is no parameter's name."""
    return owner.startswith((GROUP, OPTIMIZER))


def described(
    values: Mapping[Any, Any], parameters: Mapping[int, str], device: torch.device
) -> tuple[dict[str, Tensor], str | None]:
    """Named tensors and a text from which `put_together` makes the values again.

    A tensor on the device is itself, under its key; the text describes all else, numbers, texts, lists, dictionaries
    and tensors of other classes among it. parameters: by identity, the names of tensors that are not values but are
    referred to.

    Raises: NoForm.
    """
    tensors: dict[str, Tensor] = {}
    forms: list[Any] = []
    for key, value in values.items():
        path = _quoted(key)
        is_plain = _is_dense(value) and not value.is_complex() and value.device == device and path == key
        if is_plain and id(value) not in parameters:
            tensors[path] = value.detach()
        else:
            try:
                forms.append([_plain(key), _form(value, path, tensors, parameters)])
            except NoForm as error:
                error.key = key
                raise
    return tensors, json.dumps(forms) if forms else None


def taken_apart(values: Mapping[Any, Any], parameters: Mapping[int, str], device: torch.device) -> dict[str, Tensor]:
    """As `described`, with the text as one more tensor, `FORM`. Raises: NoForm."""
    tensors, text = described(values, parameters, device)
    if text is not None:
        tensors[FORM] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return tensors


def put_together(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[Any, Any]:
    """The values that `taken_apart` had. parameters: by name, those that are referred to.

    Raises: KeyError, TypeError or AttributeError for what `taken_apart` never gives.
    """
    left = dict(tensors)
    text = left.pop(FORM, None)
    try:
        forms = [] if text is None else json.loads(bytes(text.tolist()))
    except ValueError as error:
        raise TypeError(f"the form of an optimizer's state is no text of ours ({error})") from None
    found = {key: _value(form, left, parameters) for key, form in forms}
    return left | found


def deep_copy(value: Any, known: dict[int, Any]) -> Any:
    """As `copy.deepcopy`, of tensors of other classes too, many of which cannot be cloned.

    known: by identity, what is taken for a copy.
    """
    for own in _wrappers(value):
        names, context = own.__tensor_flatten__()
        inner = {name: deep_copy(getattr(own, name), known) for name in names}
        known[id(own)] = type(own).__tensor_unflatten__(inner, context, own.size(), own.stride())
    return copy.deepcopy(value, known)


def _wrappers(value: Any) -> Iterator[Any]:
    if is_traceable_wrapper_subclass(value):
        yield value
    elif isinstance(value, dict):
        yield from _wrappers([*value.values()])
    elif isinstance(value, list | tuple | deque):
        for own in value:
            yield from _wrappers(own)


def _quoted(key: Any) -> str:
    """A key as a part of a tensor's name, without the dots and slashes that divide such names."""
    text = quote(str(key), safe="").replace(".", "%2E")
    return f"{text}%" if text in (FORM, MASTER) or not isinstance(key, str) else text


def _plain(key: Any) -> Any:
    if not isinstance(key, _PLAIN):
        raise NoForm(key)
    return key


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_traceable_wrapper_subclass(value)


def _form(value: Any, path: str, tensors: dict[str, Tensor], parameters: Mapping[int, str]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if id(value) in parameters:
        return {"parameter": parameters[id(value)]}
    if _is_dense(value):
        tensors[path] = value.detach()
        return {"tensor": path, "host": value.device.type == "cpu", "complex": value.is_complex()}
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: _form(getattr(value, name), f"{path}/{name}", tensors, parameters) for name in names}
        kind = type(value)
        return {
            "wrapper": f"{kind.__module__}.{kind.__qualname__}",
            "inner": inner,
            "context": _form(context, f"{path}/context", tensors, parameters),
            "size": list(value.size()),
            "stride": list(value.stride()),
        }
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is dict:
        rows = enumerate(value.items())
        return {"dict": [[_plain(key), _form(own, f"{path}/{i}", tensors, parameters)] for i, (key, own) in rows]}
    for word, kind in _ROWS.items():
        if type(value) is kind or (kind is tuple and type(value) is torch.Size):
            rows = [_form(own, f"{path}/{i}", tensors, parameters) for i, own in enumerate(value)]
            return {word: rows, **({"maxlen": value.maxlen} if isinstance(value, deque) else {})}
    raise NoForm(value)


def _value(form: Any, left: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> Any:
    if not isinstance(form, dict):
        return form
    if "tensor" in form:
        tensor = left.pop(form["tensor"])
        if form["complex"] and not tensor.is_complex():
            # Files have complex numbers as pairs.
            tensor = torch.view_as_complex(tensor)
        return tensor.cpu() if form["host"] else tensor
    if "parameter" in form:
        return parameters[form["parameter"]]
    if "dtype" in form:
        return getattr(torch, form["dtype"])
    if "dict" in form:
        return {key: _value(own, left, parameters) for key, own in form["dict"]}
    if "wrapper" in form:
        inner = {name: _value(own, left, parameters) for name, own in form["inner"].items()}
        # Nothing is imported by a name that a file gives.
        known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _below(Tensor)}
        context = _value(form["context"], left, parameters)
        return known[form["wrapper"]].__tensor_unflatten__(
            inner, context, torch.Size(form["size"]), tuple(form["stride"])
        )
    word = next(word for word in _ROWS if word in form)
    rows = [_value(own, left, parameters) for own in form[word]]
    return deque(rows, form["maxlen"]) if word == "deque" else _ROWS[word](rows)


def _below(kind: Any) -> list[Any]:
    return [one for own in kind.__subclasses__() for one in (own, *_below(own))]

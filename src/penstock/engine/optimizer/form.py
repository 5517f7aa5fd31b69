"""The state that an optimizer of a user's own keeps, as named tensors and one text that says how they hang together."""

from __future__ import annotations

import copy
import json
import re
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.settings.declare import type_in_words

FORM = "form"
"""The kind of state that is the text, as bytes."""
MASTER = "master"
"""The kind of state that is the fp32 copy of a 16-bit parameter."""
STATE = "optimizer."
"""Begins the name of each tensor of state: ``optimizer.<kind>.<parameter>``."""
GROUP, OPTIMIZER = "group ", "optimizer "
"""Begin what stands for the parameter in the name of what an optimizer keeps of a whole group, or of all parameters."""
WIDE = (torch.float32, torch.float64)
"""The types of parameters that are stepped; state of a parameter's own type follows it when it has another."""
_HOST = torch.device("cpu")
_PLAIN = (type(None), bool, int, float, str)
_HOLDS = ", which a checkpoint cannot hold; it holds numbers, texts, tensors, and lists and dictionaries of them"
_BY_STATE = "key it by the parameter (self.state[p])"
_ROWS: dict[str, Any] = {"list": list, "tuple": tuple, "deque": deque}


class NoForm(ValueError):
    """A value is none that a checkpoint can hold."""

    #: the part of it that is not
    value: Any
    #: the key of the value that it is a part of
    key: Any = None
    #: how it is kept and what would be possible, in a sentence
    words: str

    def __init__(self, value: Any, words: str | None = None) -> None:
        super().__init__(f"{type(value).__name__} has no form in a checkpoint")
        self.value = value
        self.words = words or f"as {type_in_words(value)}{_HOLDS}"


def state_name(name: str) -> tuple[str, str]:
    """Kind and owner of a tensor of state, from its name."""
    _, kind, owner = name.split(".", 2)
    return kind, owner


def is_of_all(owner: str) -> bool:
    """True if that is no parameter's name."""
    return owner.startswith((GROUP, OPTIMIZER))


def described(
    values: Mapping[Any, Any],
    parameters: Mapping[int, str],
    device: torch.device = _HOST,
    owner: Tensor | None = None,
) -> tuple[dict[str, Tensor], str | None]:
    """Named tensors and a text from which `put_together` makes the values again.

    A tensor on the device is itself, under its key; the text describes all else, numbers, texts, lists, dictionaries
    and tensors of other classes among it, and those that are there twice. parameters: by identity, the names of tensors
    that are not values but are referred to. owner: the parameter whose state it is.

    Raises: NoForm.
    """
    taken, forms = _Taken(parameters, owner), []
    for key, value in values.items():
        path = _quoted(key)
        try:
            form = _form(value, path, taken)
            is_itself = path == key and _is_dense(value) and not value.is_complex() and value.device == device
            if not (is_itself and form.get("tensor") == path):
                forms.append([_plain(key), form])
        except NoForm as error:
            error.key = key
            raise
    return taken.tensors, json.dumps(forms) if forms else None


def taken_apart(
    values: Mapping[Any, Any],
    parameters: Mapping[int, str],
    device: torch.device = _HOST,
    owner: Tensor | None = None,
) -> dict[str, Tensor]:
    """As `described`, with the text as one more tensor, `FORM`. Raises: NoForm; for a parameter's address, too."""
    tensors, text = described(values, parameters, device, owner)
    for key, form in [*json.loads(text or "[]"), *((path, None) for path in tensors)]:
        if any(int(number) in parameters for number in re.findall(r"\d{1,20}", f"{key} {form}")):
            words = f"by the address of a parameter (id(p)), which another process does not have; {_BY_STATE}"
            error = NoForm(form, words)
            error.key = key
            raise error
    if text is not None:
        tensors[FORM] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return tensors


def put_together(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[Any, Any]:
    """The values that `taken_apart` had. parameters: by name, those that are referred to.

    Raises: KeyError, TypeError or AttributeError for what `taken_apart` never gives.
    """
    made, used = dict(tensors), set[str]()
    text = made.pop(FORM, None)
    try:
        forms = [] if text is None else json.loads(bytes(text.tolist()))
    except ValueError as error:
        raise TypeError(f"the form of an optimizer's state is no text of ours ({error})") from None
    found = {key: _value(form, made, used, parameters) for key, form in forms}
    return {path: own for path, own in made.items() if path not in used} | found


def keeps_type(kind: str) -> bool:
    """True for a kind of state that has another type than its parameter."""
    return "%float" in kind


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
        if isinstance(key, Tensor):
            raise NoForm(key, f"in a dictionary by tensors, which a checkpoint cannot hold; {_BY_STATE}")
        raise NoForm(key, f"under {type_in_words(key)} as the key of a dictionary{_HOLDS}")
    return key


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_traceable_wrapper_subclass(value)


@dataclass(frozen=True, eq=False)
class _Taken:
    """The tensors of values that are taken apart."""

    #: by identity, the names of tensors that are not values but are referred to
    parameters: Mapping[int, str]
    #: the parameter whose state it is
    owner: Tensor | None
    #: by path
    tensors: dict[str, Tensor] = field(default_factory=dict)
    #: by identity, their paths
    paths: dict[int, str] = field(default_factory=dict)


def _form(value: Any, path: str, taken: _Taken) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if id(value) in taken.parameters:
        return {"parameter": taken.parameters[id(value)]}
    if id(value) in taken.paths:
        return {"same": taken.paths[id(value)]}
    if _is_dense(value):
        own = value if taken.owner is None else taken.owner
        if value.dtype in WIDE and value.dtype != own.dtype and value.shape == own.shape:
            path = f"{path}%{str(value.dtype).removeprefix('torch.')}"
        taken.tensors[path], taken.paths[id(value)] = value.detach(), path
        return {"tensor": path, "host": value.device.type == "cpu", "complex": value.is_complex()}
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()  # type: ignore[attr-defined]
        inner = {name: _form(getattr(value, name), f"{path}/{name}", taken) for name in names}
        kind = type(value)
        return {
            "wrapper": f"{kind.__module__}.{kind.__qualname__}",
            "inner": inner,
            "context": _form(context, f"{path}/context", taken),
            "size": list(value.size()),
            "stride": list(value.stride()),
        }
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is dict:
        rows = enumerate(value.items())
        return {"dict": [[_plain(key), _form(own, f"{path}/{i}", taken)] for i, (key, own) in rows]}
    for word, kind in _ROWS.items():
        if type(value) is kind or (kind is tuple and type(value) is torch.Size):
            rows = [_form(own, f"{path}/{i}", taken) for i, own in enumerate(value)]
            return {word: rows, **({"maxlen": value.maxlen} if isinstance(value, deque) else {})}
    raise NoForm(value)


def _value(form: Any, made: dict[str, Tensor], used: set[str], parameters: Mapping[str, Tensor]) -> Any:
    if not isinstance(form, dict):
        return form
    if "tensor" in form:
        tensor = made[path := form["tensor"]]
        used.add(path)
        if form["complex"] and not tensor.is_complex():
            # Files have complex numbers as pairs.
            tensor = torch.view_as_complex(tensor)
        made[path] = tensor.cpu() if form["host"] else tensor
        return made[path]
    if "same" in form:
        return made[form["same"]]
    if "parameter" in form:
        return parameters[form["parameter"]]
    if "dtype" in form:
        return getattr(torch, form["dtype"])
    if "dict" in form:
        return {key: _value(own, made, used, parameters) for key, own in form["dict"]}
    if "wrapper" in form:
        inner = {name: _value(own, made, used, parameters) for name, own in form["inner"].items()}
        # Nothing is imported by a name that a file gives.
        known = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in _below(Tensor)}
        context = _value(form["context"], made, used, parameters)
        return known[form["wrapper"]].__tensor_unflatten__(
            inner, context, torch.Size(form["size"]), tuple(form["stride"])
        )
    word = next(word for word in _ROWS if word in form)
    rows = [_value(own, made, used, parameters) for own in form[word]]
    return deque(rows, form["maxlen"]) if word == "deque" else _ROWS[word](rows)


def _below(kind: Any) -> list[Any]:
    return [one for own in kind.__subclasses__() for one in (own, *_below(own))]

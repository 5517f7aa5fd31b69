"""The state of torch's optimizers by the parameters' names, as a checkpoint holds it.

A tensor that an optimizer keeps of a parameter is saved under its key. Numbers, texts, lists and dictionaries are one
text beside them, and tensors within those are numbered.
"""

from __future__ import annotations

import copy
import json
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from penstock.parallel.nested import pack, tensor_forms, unpack

FORM = "form"
"""The kind of state that is the text, as bytes; tensors within it are of the kinds ``form/0``, ``form/1`` and so on."""
MASTER = "master"
"""The kind of state that is the fp32 copy of a 16-bit parameter."""
STATE = "optimizer."
"""Begins the name of each tensor of state: ``optimizer.<kind>.<parameter>``."""
GROUP, OPTIMIZER = "group ", "optimizer "
"""Begin what stands for the parameter in the name of state that belongs to a group, or to the whole optimizer."""
WIDE = (torch.float32, torch.float64)
"""The types of parameters that are stepped; state of a parameter's own type follows it when it has another."""


def state_name(name: str) -> tuple[str, str]:
    """Kind and owner of a tensor of state, from its name."""
    _, kind, owner = name.split(".", 2)
    return kind, owner


def is_of_all(owner: str) -> bool:
    """True if that is no parameter's name."""
    return owner.startswith((GROUP, OPTIMIZER))


def keeps_type(kind: str) -> bool:
    """True for a kind of state that has another type than its parameter, such as "exp_avg%float32"."""
    return "%float" in kind


def to_tensors(values: Mapping[Any, Any], parameter: Tensor | None) -> dict[str, Tensor]:
    """The values that an optimizer keeps of a parameter, or of none, as tensors by kind.

    Raises: TypeError naming the key of a value that a checkpoint cannot hold.
    """
    tensors: dict[str, Tensor] = {}
    entries: list[list[Any]] = []
    num_within = 0
    for key, value in values.items():
        subclass = _subclass_of(value)
        if subclass is None and _has_own_name(key, value):
            tensors[_marked(key, value, parameter)] = value.detach()
            continue
        try:
            structure, within = pack([key, value if subclass is None else _inside(value)])
        except TypeError as error:
            raise TypeError(f"{key!r}: {error}") from None
        entries.append([subclass, structure])
        for number, tensor in enumerate(within, num_within):
            tensors[_marked(f"{FORM}/{number}", tensor, parameter)] = tensor
        num_within += len(within)
    if entries:
        text = json.dumps({"entries": entries})
        tensors[FORM] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return tensors


def from_tensors(tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    """The values that `to_tensors` was given.

    Raises: KeyError, ValueError, TypeError or AttributeError for what it never gives.
    """
    text = json.loads(bytes(tensors[FORM].tolist())) if FORM in tensors else {"entries": []}
    if isinstance(text, list):
        return _of_older_form(text, tensors)
    entries, numbered, values = text["entries"], dict[int, Tensor](), dict[Any, Any]()
    for kind, tensor in tensors.items():
        key, _, number = kind.partition("%")[0].partition("/")
        if number:
            numbered[int(number)] = tensor
        elif key != FORM:
            values[key] = tensor
    forms = [form for _, structure in entries for form in tensor_forms(structure)]
    within = iter([_as_read(numbered[number], dtype) for number, (dtype, _) in enumerate(forms)])
    for subclass, structure in entries:
        key, value = unpack(structure, within)
        values[key] = value if subclass is None else _put_together(subclass, **value)
    return values


def copied(values: Any) -> Any:
    """A deep copy of nested values, of tensors of other classes too."""
    return tree_map(_copied_leaf, values)


def num_bytes(values: Any) -> int:
    """The memory of the tensors in nested values."""
    num = 0
    for leaf in tree_leaves(values):
        if is_traceable_wrapper_subclass(leaf):
            num += sum(tensor.nbytes for tensor in _inside(leaf)["tensors"].values())
        elif isinstance(leaf, Tensor):
            num += leaf.nbytes
    return num


def _has_own_name(key: Any, value: Any) -> bool:
    """True for a dense tensor whose key can be its kind; complex numbers, which files have as pairs, need the text."""
    is_word = isinstance(key, str) and re.fullmatch(r"\w+", key) and key not in (FORM, MASTER)
    return bool(is_word) and isinstance(value, Tensor) and value.layout is torch.strided and not value.is_complex()


def _marked(kind: str, tensor: Tensor, parameter: Tensor | None) -> str:
    """The kind, with the tensor's type where that is not its parameter's."""
    if parameter is None or tensor.shape != parameter.shape or tensor.dtype not in WIDE:
        return kind
    return kind if tensor.dtype == parameter.dtype else f"{kind}%{str(tensor.dtype).removeprefix('torch.')}"


def _as_read(tensor: Tensor, dtype: str) -> Tensor:
    """A tensor of that type, of which files have complex numbers as pairs."""
    return torch.view_as_complex(tensor) if getattr(torch, dtype).is_complex and not tensor.is_complex() else tensor


# ---- tensors of other classes, such as torchao's quantized ones


def _copied_leaf(leaf: Any) -> Any:
    if not is_traceable_wrapper_subclass(leaf):
        # A deep copy of a tensor without values would be one of memory that it does not have.
        return leaf.detach().clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
    # Many of these classes cannot be cloned.
    inside = _inside(leaf)
    inside["tensors"] = {name: tensor.clone() for name, tensor in inside["tensors"].items()}
    return _put_together(_name_of(type(leaf)), **inside)


def _subclass_of(value: Any) -> str | None:
    """The name of the class of a tensor that is made of others; None for any other value."""
    return _name_of(type(value)) if is_traceable_wrapper_subclass(value) else None


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _inside(tensor: Any) -> dict[str, Any]:
    """The plain tensors of which a tensor is made, and all else of it."""
    names, context = tensor.__tensor_flatten__()
    tensors = {name: getattr(tensor, name) for name in names}
    return {"tensors": tensors, "context": context, "size": list(tensor.size()), "stride": list(tensor.stride())}


def _put_together(
    name: str, tensors: Mapping[str, Tensor], context: Any, size: Iterable[int], stride: Iterable[int]
) -> Any:
    # Nothing is imported by a name that a file gives.
    classes = {_name_of(kind): kind for kind in _subclasses(Tensor)}
    return classes[name].__tensor_unflatten__(dict(tensors), context, torch.Size(size), tuple(stride))


def _subclasses(kind: Any) -> list[Any]:
    return [one for subclass in kind.__subclasses__() for one in (subclass, *_subclasses(subclass))]


# ---- the form of checkpoints that were saved before 0.1.0


def _of_older_form(entries: list[Any], tensors: Mapping[str, Tensor]) -> dict[Any, Any]:
    used = set[str]()
    values = {key: _older_value(form, tensors, used) for key, form in entries}
    return {kind: tensor for kind, tensor in tensors.items() if kind != FORM and kind not in used} | values


def _older_value(form: Any, tensors: Mapping[str, Tensor], used: set[str]) -> Any:
    if not isinstance(form, dict):
        return form
    if path := form.get("same"):
        return tensors[path]
    if path := form.get("tensor"):
        used.add(path)
        return _as_read(tensors[path], "complex64") if form["complex"] else tensors[path]
    if "dtype" in form:
        return getattr(torch, form["dtype"])
    if "dict" in form:
        return {key: _older_value(inner_form, tensors, used) for key, inner_form in form["dict"]}
    if "wrapper" in form:
        inner = {name: _older_value(inner_form, tensors, used) for name, inner_form in form["inner"].items()}
        context = _older_value(form["context"], tensors, used)
        return _put_together(form["wrapper"], inner, context, form["size"], form["stride"])
    kind = {"list": list, "tuple": tuple, "deque": deque}[min(form)]
    return kind(_older_value(inner_form, tensors, used) for inner_form in form[min(form)])

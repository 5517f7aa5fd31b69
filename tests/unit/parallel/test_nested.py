"""Nested values come back from the JSON and the tensors that they are taken apart into."""

import json
from collections import OrderedDict
from typing import Any

import pytest
import torch

from penstock.parallel.nested import pack, tensor_forms, unpack

VALUES: list[Any] = [
    None,
    [1, 2.5, True, "text", ()],
    {"a": {"b": [torch.arange(3), (torch.ones(2, dtype=torch.bool),)]}, "c": torch.zeros(0, 4)},
    {1: "one", 2.5: None, None: [], False: {}},
    {"tensor of": 1, "tuple of": [2], "mapping of": torch.ones(1, dtype=torch.complex64)},
]


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_a_nested_value_comes_back_from_json_and_its_tensors(value: Any) -> None:
    structure, tensors = pack(value)
    structure = json.loads(json.dumps(structure))
    assert tensor_forms(structure) == [[str(own.dtype).removeprefix("torch."), list(own.shape)] for own in tensors]
    assert repr(unpack(structure, tensors)) == repr(value)


def test_subclasses_become_plain_and_tensors_lose_their_graph() -> None:
    found = unpack(*pack(OrderedDict(a=torch.ones(1, requires_grad=True).exp())))
    assert type(found) is dict and not found["a"].requires_grad


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([{3}], "a set cannot be saved or sent; possible are numbers, strings, tensors"),
        ({(1, 2): 3}, "a mapping with a tuple as a key cannot be saved or sent"),
        (torch.eye(2).to_sparse(), r"a tensor of layout torch\.sparse_coo cannot be saved or sent"),
    ],
)
def test_what_cannot_be_taken_apart_is_named(value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        pack(value)

"""An optimizer's values of a parameter come back from tensors and a text, in today's form and in older ones."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.optimizer.state import FORM, copied, from_tensors, keeps_type, num_bytes, to_tensors

PARAMETER = nn.Parameter(torch.zeros(2, 3))


def text_of(value: Any) -> Tensor:
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


@pytest.mark.shows(162)
@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({"step": torch.tensor(3.0), "exp_avg": torch.ones(2, 3)}, {"step", "exp_avg"}),
        ({"momentum": torch.ones(2, 3, dtype=torch.float64)}, {"momentum%float64"}),
        ({"momentum": torch.ones(2, 3, dtype=torch.bfloat16)}, {"momentum"}),
        ({"k": 3, "d": 0.1, 7: None, "last": (1, "a")}, {FORM}),
        ({"sides": [torch.eye(2), torch.eye(3)], "mean": torch.ones(())}, {FORM, "form/0", "form/1", "mean"}),
        ({"z": torch.ones(2, 3, dtype=torch.complex64), "a.b/c": torch.ones(1)}, {FORM, "form/0", "form/1"}),
        ({FORM: torch.ones(1), "master": torch.ones(2)}, {FORM, "form/0", "form/1"}),
    ],
)
def test_values_come_back_from_their_tensors(values: dict[Any, Any], kinds: set[str]) -> None:
    tensors = to_tensors(values, PARAMETER)
    assert set(tensors) == kinds
    found = from_tensors(tensors)
    assert {key: repr(value) for key, value in found.items()} == {key: repr(value) for key, value in values.items()}


def test_only_state_of_another_type_of_fractions_than_its_parameters_keeps_it() -> None:
    values = {"codes": torch.ones(2, 3, dtype=torch.int8), "wide": torch.ones(2, 3).double(), "norm": torch.ones(2, 3)}
    assert [keeps_type(kind) for kind in to_tensors(values, PARAMETER)] == [False, True, False]
    assert not any(keeps_type(kind) for kind in to_tensors(values, None))


@pytest.mark.parametrize("value", [{1}, [object()], {"a": {(1, 2): 3}}])
def test_a_value_that_no_checkpoint_can_hold_is_named_by_its_key(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^'log': an? .* cannot be saved or sent"):
        to_tensors({"step": 1, "log": value}, PARAMETER)


@pytest.mark.shows(162)
def test_an_older_form_is_read() -> None:
    tensors = {
        "exp_avg": torch.ones(2, 3),
        "sides/0": torch.eye(2),
        "z": torch.tensor([[1.0, 2.0]]),
        FORM: text_of(
            [
                ["k", 3],
                ["sides", {"list": [{"tensor": "sides/0", "host": True, "complex": False}, None]}],
                ["last", {"tuple": [{"dict": [[7, {"dtype": "float16"}]]}, {"same": "exp_avg"}]}],
                ["z", {"tensor": "z", "host": False, "complex": True}],
                ["rows", {"deque": [1, 2], "maxlen": 3}],
            ]
        ),
    }
    found = from_tensors(tensors)
    assert list(found) == ["exp_avg", "k", "sides", "last", "z", "rows"]
    assert found["k"] == 3 and torch.equal(found["sides"][0], torch.eye(2)) and found["sides"][1] is None
    assert found["last"][0] == {7: torch.float16} and found["last"][1] is found["exp_avg"] is tensors["exp_avg"]
    assert found["z"].tolist() == [1 + 2j] and list(found["rows"]) == [1, 2]


def test_a_copy_is_of_other_memory_and_its_bytes_are_counted() -> None:
    values = {"a": [torch.ones(4)], "b": {"c": torch.ones(2, dtype=torch.int8)}, "d": 1}
    other = copied(values)
    values["a"][0].zero_()
    assert other["a"][0].tolist() == [1.0] * 4 and other["d"] == 1
    assert num_bytes(values) == 18

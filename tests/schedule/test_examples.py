"""Every public class and function of the room has an example in its docstring, and all examples are true."""

import doctest
import inspect

import pytest

from penstock import schedule


def has_docstring(subject: object) -> bool:
    """Whether a public name can carry an example; a plain value or an alias of types cannot."""
    return inspect.isfunction(subject) or inspect.isclass(subject)


NAMES = [name for name in schedule.__all__ if has_docstring(getattr(schedule, name))]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_is_true(name: str):
    found = doctest.DocTestFinder(recurse=False).find(getattr(schedule, name), name)
    assert sum(len(test.examples) for test in found) > 0, f"schedule.{name} has no example in its docstring"
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0


def test_the_example_of_the_room_is_true():
    failed, tried = doctest.testmod(schedule)
    assert tried > 0 and failed == 0

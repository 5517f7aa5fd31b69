"""Each public class and function of the package has an example in its docstring that runs and shows what it gives."""

import doctest
import importlib

import pytest
import torch

import penstock

SEEN = {name: getattr(penstock, name) for name in penstock.__all__} | {"torch": torch}
# Constants have no docstring.
NAMES = [name for name in penstock.__all__ if callable(SEEN[name])]


@pytest.mark.parametrize("name", NAMES)
def test_the_example_of_a_public_name_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    public = SEEN[name]
    module = importlib.import_module(public.__module__)
    found = doctest.DocTestFinder(recurse=False).find(public, name, module, SEEN | vars(module))
    assert sum(len(test.examples) for test in found) > 0, f"penstock.{name} has no example in its docstring"
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in found:
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out

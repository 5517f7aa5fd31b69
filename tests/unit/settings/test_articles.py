"""Messages name types with the article that they are read with."""

import re
from pathlib import Path

import pytest

import penstock
from penstock.settings.arguments import type_in_words


@pytest.mark.parametrize(
    "name, words",
    [
        ("int", "an int"),
        ("str", "a str"),
        ("OrderedDict", "an OrderedDict"),
        ("NoneType", "a NoneType"),
        ("Linear", "a Linear"),
        ("MLP", "an MLP"),
        ("SGD", "an SGD"),
        ("RMSNorm", "an RMSNorm"),
        ("ReLU", "a ReLU"),
        ("UnitSpec", "a UnitSpec"),
        ("UnboundedQueue", "an UnboundedQueue"),
        ("GPT2Block", "a GPT2Block"),
    ],
)
def test_a_type_has_the_article_that_it_is_read_with(name: str, words: str):
    assert type_in_words(type(name, (), {})()) == words


def test_no_message_puts_its_own_article_before_a_type():
    sources = sorted(Path(penstock.__file__).parent.rglob("*.py"))
    wrong = [
        f"{path.name}: {found[0]}"
        for path in sources
        for found in re.finditer(r"\ban? (\"\s*f?\")?\{type\(.*", path.read_text(encoding="utf-8"))
    ]
    assert len(sources) > 200 and not wrong

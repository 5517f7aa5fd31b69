"""Corpora for the tests of data."""

from typing import Any

from penstock.data import CorpusSpec
from penstock.settings import DataConfig


def corpus_spec(corpus: str = "stdlib", **settings: Any) -> CorpusSpec:
    """The corpus of these settings of its text, and of further fields of `CorpusSpec`."""
    names = ("max_example_tokens", "ends_rows", "pairs", "pad_token")
    further = {name: settings.pop(name) for name in names if name in settings}
    return CorpusSpec(DataConfig(corpus=corpus, **settings), **further)

"""The walks of docs/architecture.md name the files that each walk enters, in the order of its first call into each."""

import itertools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

from penstock import Engine, MicroBatchSpec, PackedBatch, SamplingParams
from penstock.cli.train import read_arguments
from penstock.engine.folders.run_check import check_run, with_pretrained
from penstock.engine.folders.run_parts import engine_arguments
from penstock.model import decoder_units
from penstock.settings import ModelConfig
from tests.package_source import PACKAGE

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
FOLDER = f"{PACKAGE}/"
NUM_TOKENS = 10


def listed(walk: str) -> list[str]:
    """The files of a walk's table on the page, from top to bottom."""
    _, text = PAGE.split(f"\n## Walk: {walk}\n")
    return re.findall(r"^\| \[`([^`]+)`\]\(\.\./src/penstock/\1\) \|", text.partition("\n## ")[0], re.MULTILINE)


def entered(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The package's functions that a call enters, one after another, each with its file."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(FOLDER):
            found.append((path.removeprefix(FOLDER), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def files_of(functions: list[tuple[str, str]]) -> list[str]:
    return list(dict.fromkeys(file for file, _ in functions))


def batch() -> PackedBatch:
    return PackedBatch.from_documents([torch.arange(12), torch.arange(9)])


def train(engine: Engine) -> None:
    engine.train_batch(batch(), micro_batches=MicroBatchSpec(num=2))


def assert_true(walk: str, found: list[str]) -> None:
    shown = listed(walk)
    assert set(shown) == set(found), (
        f"docs/architecture.md, {walk}: not entered {sorted(set(shown) - set(found))}, "
        f"not listed {sorted(set(found) - set(shown))}"
    )
    assert shown == found, f"docs/architecture.md, {walk}: the order is {found}"


def assert_in_order(walk: str, found: list[str]) -> None:
    shown = listed(walk)
    assert len(shown) > 8
    assert [file for file in found if file in shown] == shown


@pytest.fixture(scope="module")
def engine() -> Engine:
    """A small decoder in one process, which has trained and generated before: first calls enter more."""
    config = ModelConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2, num_kv_heads=2, max_length=64
    )
    engine = Engine(lambda groups: decoder_units(config, groups=groups), 32)
    train(engine)
    engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=2))
    return engine


def test_the_walk_of_a_batch_is_true(engine: Engine) -> None:
    packed = batch()
    assert_true("a batch", files_of(entered(lambda: engine.train_batch(packed, micro_batches=MicroBatchSpec(num=2)))))


def test_the_walk_of_a_token_is_true(engine: Engine) -> None:
    """A token lasts from one choice of a batch to the next; the prompt's is the first, and each later one is alike."""
    calls = entered(lambda: engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=NUM_TOKENS)))
    begins = [place for place, (_, name) in enumerate(calls) if name == "Scheduler.schedule"]
    assert len(begins) >= NUM_TOKENS
    tokens = [files_of(calls[begin:end]) for begin, end in itertools.pairwise(begins[1:NUM_TOKENS])]
    assert len(tokens) == NUM_TOKENS - 2 and all(token == tokens[0] for token in tokens)
    assert_true("a token", tokens[0])


def test_the_walk_of_a_setting_is_true() -> None:
    words = [str(ROOT / "examples/tiny.toml"), "--schedule.name", "zb-h1"]
    calls = entered(lambda: engine_arguments(check_run(with_pretrained(read_arguments(words).config)), vocab_size=256))
    assert_true("a setting", files_of(calls))


def test_the_walk_of_a_users_layer_enters_the_files_that_it_lists_in_their_order() -> None:
    layers = [nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)]
    assert_in_order("a user's layer", files_of(entered(lambda: train(Engine.from_layers(layers, hidden_size=32)))))


def test_the_walk_of_a_checkpoint_enters_the_files_that_it_lists_in_their_order(tmp_path: Path) -> None:
    engine = Engine.from_layers([nn.Embedding(64, 32), nn.Linear(32, 64)], hidden_size=32)
    train(engine)
    calls = [*entered(lambda: engine.save(tmp_path)), *entered(lambda: engine.load(tmp_path))]
    assert_in_order("a checkpoint", files_of(calls))


def test_the_walk_of_a_request_names_files_that_there_are() -> None:
    files = listed("a request")
    assert {"serve/app.py", "serve/replies.py"} < set(files)
    assert [file for file in files if not (PACKAGE / file).is_file()] == []

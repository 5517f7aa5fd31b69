"""Hosts of a run that have another version of Penstock or torch are refused by name, however the run was started."""

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import ConfigError, Engine, Layout
from tests.dist.launch import run_ranks
from tests.e2e.scripts import free_port
from tests.e2e.training import Started, write_run
from tests.fork_server import run_command
from tests.hugging_face import make_model

OTHER = "2.0.0"


def with_other_torch(arguments: Sequence[str]) -> int:
    if os.environ["RANK"] == "1":
        torch.__version__ = OTHER  # pyright: ignore[reportAttributeAccessIssue]
    return run_command(arguments)


def with_other_penstock(arguments: Sequence[str]) -> int:
    import penstock.parallel.host

    if os.environ["RANK"] == "1":
        penstock.parallel.host.__version__ = OTHER
    return run_command(arguments)


def differing(name: str) -> str:
    return f"penstock: all hosts of a run need the same versions, but these differ: {name} ('{OTHER}' on rank 1, '"


@pytest.mark.shows(169)
@pytest.mark.parametrize(
    ("command", "name", "program"), [("train", "torch", with_other_torch), ("score", "penstock", with_other_penstock)]
)
def test_a_host_with_another_version_is_refused_by_name_before_anything_is_written(
    tmp_path: Path, command: str, name: str, program: Callable[[Sequence[str]], int]
):
    words = [str(write_run(tmp_path, "run", 8))]
    if command == "score":
        make_model("llama").save_pretrained(tmp_path / "model")
        (tmp_path / "texts.jsonl").write_text('{"tokens": [1, 2]}\n')
        words = [str(tmp_path / "model"), str(tmp_path / "texts.jsonl"), "--pp", "2"]
    before = {path for path in tmp_path.rglob("*") if "cache" not in path.parts}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with contextlib.ExitStack() as stack:
        ranks = [Started(words, {**shared, "RANK": str(rank)}, None, command, program) for rank in range(2)]
        ended = [rank.end() for rank in [stack.enter_context(rank) for rank in ranks]]
    assert [one.exit_code for one in ended] == [2, 2], ended
    [told] = [one.err for one in ended if one.err]
    assert told.startswith(differing(name)) and told.count("\n") == 1, told
    assert {path for path in tmp_path.rglob("*") if "cache" not in path.parts} == before


def made_with_another_version(rank: int) -> str:
    if rank == 1:
        torch.__version__ = OTHER  # pyright: ignore[reportAttributeAccessIssue]
    layers: list[Any] = [torch.nn.Linear(4, 4) for _ in range(2)]
    with pytest.raises(ConfigError) as caught:
        Engine.from_layers(layers, hidden_size=4, layout=Layout(pp=2))
    return f"penstock: {caught.value}"


@pytest.mark.shows(169)
def test_an_engine_made_in_python_refuses_another_version_on_every_rank():
    told = run_ranks(2, made_with_another_version)
    assert told[0] == told[1]
    assert told[0].startswith(differing("torch")), told

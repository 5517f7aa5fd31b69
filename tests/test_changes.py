"""Patches in tests/changes show which files a server field, a command, a switch of a layer and a kind of action change.

CONTRIBUTING.md lists those files. Each patch is applied to a copy of the package, whose user then has what it adds.
"""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from penstock.serve.mailboxes import Mailboxes

ROOT = Path(__file__).parents[1]
# The root of the hidden size is a power of two: scaling by it changes no digit.
RUN = """[model]
hidden_size = 16
intermediate_size = 24
num_layers = 1
num_heads = 2
"""

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git applies the patches, and is not installed")


def patched(change: str, folder: Path, most: int) -> list[str]:
    """Apply a patch to a copy of the package, beside the tests that it changes; at most so many files of the package.

    Returns: the files that it changes, in its order.
    """
    patch = ROOT / "tests/changes" / f"{change}.patch"
    files = re.findall(r"^\+\+\+ b/(.+)$", patch.read_text(), re.MULTILINE)
    assert 0 < sum(file.startswith("src/") for file in files) <= most
    shutil.copytree(ROOT / "src", folder / "src")
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / file).exists():
            shutil.copy2(ROOT / file, folder / file)
    # Inside of another repository git would leave out what lies elsewhere in it.
    alone = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    applied = subprocess.run(["git", "apply", patch], cwd=folder, env=alone, capture_output=True, text=True)
    assert applied.returncode == 0, f"{patch.name} no longer fits, make it anew with git diff -U1:\n{applied.stderr}"
    return files


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run Python with these words, with the package in that folder."""
    paths = {"PYTHONPATH": os.pathsep.join([str(folder / "src"), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env={**os.environ, **paths}, capture_output=True, text=True
    )


def found_by(function: str, folder: Path) -> Any:
    """What a function of this file returns, called in a process with the package in that folder."""
    done = run(folder, "-c", f"from tests import test_changes as own; own.print_json(own.{function}())")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def print_json(content: Any) -> None:
    print(json.dumps(content))


def shown(change: str) -> list[str]:
    """The files that CONTRIBUTING.md has in the patch's line."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (line,) = re.findall(rf"^\* [^\n]*\]\(tests/changes/{change}\.patch\)(.*?)(?=\n[*\n])", text, re.M | re.S)
    return re.findall(r"`([a-z_/]+\.py)`", line)


def in_page(files: list[str]) -> list[str]:
    """Changed files as CONTRIBUTING.md names them: those that are there already, without the package's own folder."""
    return [file.removeprefix("src/penstock/") for file in files if (ROOT / file).exists()]


def test_a_server_field_changes_one_file(tmp_path: Path) -> None:
    files = patched("server-field", tmp_path, most=1)
    assert in_page(files) == shown("server-field")
    plain, without = found_by("answers", tmp_path)
    assert len(plain) == len(without) == 4
    assert plain[0] not in without


def answers() -> list[list[str]]:
    """The tokens of two answers of a server: the likeliest ones, and those without the first of them."""
    from penstock import Engine
    from penstock.engine import GenerateOptions
    from penstock.engine.generation.requests import RequestQueue
    from penstock.model import Limits, decoder_units
    from penstock.schedule import RingShape
    from penstock.serve.app import ServerParts
    from penstock.serve.asked import ServedModel
    from penstock.serve.mailboxes import Mailboxes
    from penstock.serve.metrics import ServerMetrics
    from penstock.serve.server import http_thread, listening_socket
    from penstock.settings import ModelConfig, ServeConfig

    config = ModelConfig(32, 16, 24, num_layers=1, num_heads=2, max_length=16)
    engine = Engine(lambda groups: decoder_units(config, groups=groups), 16)
    model = ServedModel("m", ServeConfig(), 0, None, None, Limits(32, 16), 2, (), {})
    boxes = Mailboxes(lambda publish: RequestQueue(1, 1, None, publish))
    parts = ServerParts(model, boxes, ServerMetrics(lambda: boxes.queue.counts), None)
    listener, found = listening_socket("127.0.0.1", 0), []
    with http_thread(parts, listener):
        client = Thread(target=ask, args=(listener.getsockname()[1], boxes, found))
        client.start()
        engine.generator.serve(boxes.queue, RingShape(1, 1), 16, GenerateOptions())
        client.join()
    return found


def ask(port: int, boxes: "Mailboxes", found: list[list[str]]) -> None:
    """Ask a server without a tokenizer for an answer, and for one without the first token of that; then end it."""
    asked: dict[str, Any] = {"model": "m", "prompt": [7, 3], "temperature": 0, "max_tokens": 4, "logprobs": 0}
    try:
        for _ in range(2):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(asked))
            found.append(json.loads(connection.getresponse().read())["choices"][0]["logprobs"]["tokens"])
            connection.close()
            asked["bad_words_ids"] = [[int(found[0][0].strip("<>"))]]
    finally:
        boxes.close("asked enough")


def test_a_switch_of_a_layer_changes_four_files_with_its_test(tmp_path: Path) -> None:
    files = patched("layer-switch", tmp_path, most=3)
    assert len(files) == 4
    assert in_page(files) == shown("layer-switch")
    plain, scaled, expected = found_by("losses", tmp_path)
    assert scaled == expected != plain


def losses() -> list[float]:
    """The losses of a run as it is, with embeddings scaled by a setting, and with scaled weights instead."""
    import torch

    from penstock import Engine, PackedBatch

    batch, found = PackedBatch.from_documents([torch.arange(9)]), []
    for line, factor in (("", 1.0), ("scale_embeddings = true", 1.0), ("", 4.0)):
        Path("run.toml").write_text(RUN + line)
        engine = Engine.from_config("run.toml")
        engine.parameters()["embedding.weight"].data *= factor
        found.append(float(engine.evaluate([batch])))
    return found


@pytest.mark.shows(210)
def test_a_kind_of_action_changes_five_files_with_its_test(tmp_path: Path) -> None:
    files = patched("action", tmp_path, most=4)
    assert len(files) == 5
    assert sorted(in_page(files)) == sorted(shown("action"))
    # Not one of the files that read the table is among them: rules, lowering, proof, simulation, texts, pictures.
    case = "tests/schedule/test_moves.py::test_a_check_takes_its_time_and_leaves_activations_as_they_are"
    assert run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, case).returncode == 0
    plain, checked = found_by("with_checks", tmp_path)
    assert plain == checked


def with_checks() -> list[list[float]]:
    """The losses of three steps, as they are and with checks of gradients in their order."""
    from dataclasses import replace

    import torch

    from penstock import Engine, EngineOptions, MicroBatchSpec, PackedBatch, schedule
    from penstock.model import decoder_units
    from penstock.schedule.text import parse_step
    from penstock.settings import ModelConfig

    config, found = ModelConfig(32, 16, 24, num_layers=1, num_heads=2, max_length=16), list[list[float]]()
    built = schedule.build("1f1b", ranks=1, microbatches=2)
    steps = tuple(parse_step(word) for word in ["0F0", "0B0", "0F1", "0C1", "0B1"])
    for one in (built, replace(built, orders=(steps,))):
        engine = Engine(decoder_units(config), 16, options=EngineOptions(one, device="cpu"))
        batch, spec = PackedBatch.from_documents([torch.arange(9), torch.arange(5)]), MicroBatchSpec(num=2)
        found.append([engine.train_batch(batch, micro_batches=spec).loss for _ in range(3)])
        engine.close()
    return found


def test_a_command_changes_two_files(tmp_path: Path) -> None:
    files = patched("command", tmp_path, most=2)
    assert in_page(files) == shown("command")
    assert len(files) == 2 and not (ROOT / files[0]).exists()
    assert "\n  setting   show what a setting" in run(tmp_path, "-m", "penstock", "--help").stdout
    done = run(tmp_path, "-m", "penstock", "setting", "train.steps")
    assert (done.returncode, done.stdout) == (0, "train.steps = 100 (int)\nOptimizer steps.\n"), done.stderr

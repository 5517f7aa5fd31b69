"""A run's folder is whole: moved elsewhere, without its model, it generates, serves, converts and resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.engine.folders.model_folder import open_model
from penstock.engine.folders.runs import read_metrics
from tests.chat import LLAMA3, assistant, user
from tests.e2e.serving import serving
from tests.hugging_face import make_model, make_tokenizer

QUIET = ("--log.timeline", "false", "--log.tensorboard", "false")
SETTINGS = {"eos_token_id": [2, 4], "temperature": 0.5}


def answers(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    capsys.readouterr()
    assert main(["generate", *words, "--max-new-tokens", "4", "--json"]) == 0
    return json.loads(capsys.readouterr().out)["answers"]


@pytest.mark.shows(180)
def test_a_run_moved_elsewhere_without_its_model_does_all_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    monkeypatch.chdir(here)
    make_model("llama", vocab_size=300).save_pretrained("base")
    make_tokenizer(Path("base"), chat_template=LLAMA3)
    Path("base/generation_config.json").write_text(json.dumps(SETTINGS))
    rows = [{"messages": [user(f"what said the cat {n}?"), assistant("cat " * (n % 3 + 1))]} for n in range(12)]
    Path("chat.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    begun = ["train", "--model.pretrained", "base", "--data.corpus", "chat.jsonl", "--output", "run", *QUIET]
    assert (
        main(
            [
                *begun,
                "--data.cache",
                "None",
                "--train.num_microbatches",
                "2",
                "--train.steps",
                "2",
                "--optimizer.num_decay_steps",
                "4",
            ]
        )
        == 0
    )
    before = answers(capsys, "run", "the cat")
    assert main(["convert", "run", "whole"]) == 0
    whole = {path.name: path.read_bytes() for path in Path("whole").iterdir()}
    assert "chat_template.jinja" in whole
    # A model and a tokenizer of the same names lie where the run goes.
    shutil.move("run", there / "moved")
    (there / "texts").mkdir()
    shutil.move("chat.jsonl", there / "texts")
    shutil.rmtree("base")
    monkeypatch.chdir(there)
    make_model("llama", vocab_size=400).save_pretrained("base")
    assert answers(capsys, "moved", "the cat") == before
    assert dict(open_model("moved").sampling)["temperature"] == SETTINGS["temperature"]
    assert main(["convert", "moved", "whole"]) == 0
    assert {path.name: path.read_bytes() for path in Path("whole").iterdir()} == whole
    shutil.rmtree("base")
    # The settings may lie in the run alone. Its text is known by its tokens, in whatever folder it lies.
    again = ["train", "moved/run.toml", "--output", "moved", "--train.steps", "4", "--resume", "--data.corpus"]
    Path("other.jsonl").write_text(f"{json.dumps(rows[0])}\n" * 12)
    settings = Path("moved/run.toml").read_bytes()
    assert main([*again, "other.jsonl"]) == 2
    assert "belongs to another corpus" in capsys.readouterr().err
    assert Path("moved/run.toml").read_bytes() == settings
    assert main([*again, "texts/chat.jsonl"]) == 0
    assert [entry["step"] for entry in read_metrics(Path("moved/metrics.jsonl")) if "loss" in entry] == [1, 2, 3, 4]
    capsys.readouterr()
    with serving(Path("moved").resolve()) as served:
        asked = {"model": "moved", "messages": [user("hello")], "max_tokens": 4}
        status, body = served.post("/v1/chat/completions", asked)
        assert status == 200, body

"""A run's folder is asked what Hugging Face's is asked: its ratings, its vocabulary, and what it began with."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForSequenceClassification

from penstock.engine import Engine
from penstock.engine.checkpoint import Checkpointer
from penstock.engine.checkpoint.manifest import published
from penstock.engine.folders.export import ExportOptions, to_hugging_face
from penstock.engine.folders.model_folder import open_model
from penstock.engine.folders.run_check import with_pretrained
from penstock.engine.folders.run_parts import engine_arguments
from penstock.engine.folders.runs import RunLock
from penstock.settings import ConfigError, RunConfig, from_dict
from tests.hugging_face import SIZES, make_model, make_tokenizer


def save_run(folder: Path, data: dict[str, str], vocab_size: int, steps: Sequence[int] = (0,)) -> None:
    """Begin a run, which leaves the size of its vocabulary out, and save checkpoints."""
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2}
    save(from_dict({"output": str(folder), "model": sizes, "data": data}), vocab_size, steps)


def begin_run(source: Path, folder: Path, **data: str) -> None:
    """Begin a run with the model of a folder."""
    config = from_dict({"output": str(folder), "model": {"pretrained": str(source)}, "data": data})
    config = with_pretrained(config)
    save(config, config.model.vocab_size or 0, (0,))


def save(config: RunConfig, vocab_size: int, steps: Sequence[int]) -> None:
    RunLock(config).close()
    engine = Engine(*engine_arguments(config, vocab_size))
    saved = Checkpointer(Path(config.output) / "checkpoints", engine.grid, config.identity(), aliases=engine.ties)
    for step in steps:
        saved.save(step, engine.state(optimizer=False), extra={}, wait=True)
    engine.close()


def test_a_run_with_a_reward_model_is_refused_where_tokens_are_wanted(tmp_path: Path) -> None:
    """As the folder it began with is, from whose config.json it has the token that pads texts."""
    config = AutoConfig.for_model("llama", **SIZES | {"pad_token_id": 3}, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "reward")
    begin_run(tmp_path / "reward", tmp_path / "run", tokenizer="bytes")
    for name in ("reward", "run"):
        with pytest.raises(ValueError, match="rates texts and gives no tokens"):
            open_model(tmp_path / name)
        found = open_model(tmp_path / name, may_rate=True)
        assert (found.rates, found.is_reward_model, found.pad_token) == ("texts", True, 3)


def test_of_a_damaged_checkpoint_to_begin_with_nothing_is_said_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Who completes a run's settings has said it; its parts are made on every rank."""
    save_run(tmp_path / "first", {"tokenizer": "bytes"}, 256, steps=(1, 2))
    _, newest = published(tmp_path / "first" / "checkpoints")
    next(newest.glob("*.safetensors")).write_bytes(b"")
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "pretrained": str(tmp_path / "first")}
    config = from_dict({"output": str(tmp_path / "next"), "model": sizes, "data": {"tokenizer": "bytes"}})
    engine_arguments(config, 256)
    assert caplog.messages == []
    assert open_model(tmp_path / "first").step == 1
    assert [newest.name in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(("end_token", "size", "ends"), [(None, 256, ()), ("</s>", 257, (256,))])
def test_a_run_knows_the_token_that_it_put_after_each_text(
    end_token: str | None, size: int, ends: tuple[int, ...], tmp_path: Path
) -> None:
    data = {"tokenizer": "bytes"} | ({} if end_token is None else {"end_token": end_token})
    save_run(tmp_path / "run", data, size)
    found = open_model(tmp_path / "run")
    assert (found.vocab_size, tuple(found.end_tokens)) == (size, ends)
    to_hugging_face(tmp_path / "run", tmp_path / "out", ExportOptions())
    written = open_model(tmp_path / "out")
    assert written.tokenizer is not None
    assert (written.tokenizer.vocab_size, tuple(written.end_tokens)) == (size, ends)


def test_a_run_that_began_with_a_run_keeps_the_settings_of_the_first_folder(tmp_path: Path) -> None:
    model = make_model("qwen2", vocab_size=300, eos_token_id=[2, 4])
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(tmp_path / "model")
    begin_run(tmp_path / "model", tmp_path / "first")
    begin_run(tmp_path / "first", tmp_path / "second")
    to_hugging_face(tmp_path / "second", tmp_path / "back", ExportOptions())
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("model", "back"))
    assert "eos_token_id" in before
    assert after == before


def test_a_run_that_has_no_checkpoint_yet_needs_the_folder_it_begins_with(tmp_path: Path) -> None:
    base = tmp_path / "base"
    make_model("llama").save_pretrained(base)
    config = from_dict(
        {"output": str(tmp_path / "run"), "model": {"pretrained": str(base)}, "data": {"tokenizer": "bytes"}}
    )
    RunLock(with_pretrained(config)).close()
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=r"^model.pretrained = "):
        with_pretrained(config)

"""Files that someone has tampered with: each is refused in one sentence or passed over, and none is run."""

import hashlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.cli.main import main
from penstock.cli.models.input_lines import InputReader
from penstock.data import BatchError, CorpusError, PackedBatch
from penstock.data.corpus import load_store
from penstock.draw.layers import read_recorded_step
from penstock.engine.checkpoint.manifest import (
    CheckpointInfo,
    DamagedCheckpoint,
    read_manifest,
    write_manifest,
)
from penstock.engine.folders.model_folder import open_model
from penstock.engine.folders.runs import read_metrics
from penstock.model.hf.files import INDEX_FILE, SINGLE_FILE
from penstock.schedule import ScheduleError, files
from penstock.settings import read_config
from tests.hugging_face import make_model

# What no reader of JSON may choke on.
RAW = {
    "deep list": b"[" * 100_000,
    "deep object": b'{"a":' * 100_000,
    "nothing": b"",
    "null": b"null",
    "a list": b"[]",
    "a string": b'"x"',
    "a number": b"3",
    "no text": b"\xff\xfe\x00",
    "cut short": b'{"a": [1,',
    "a long number": b"9" * 6000,
}


def is_sentence(error: BaseException) -> bool:
    return "\n" not in str(error) and len(str(error)) < 2500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "model"
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture
def opened(model: Path) -> Callable[[str, bytes], None]:
    """Opens the model with one of its files replaced."""

    def open_with(name: str, content: bytes) -> None:
        path = model / name
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        try:
            open_model(model)
        finally:
            path.unlink() if before is None else path.write_bytes(before)

    return open_with


@pytest.mark.shows(148)
@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX_FILE, "tokenizer.json"])
def test_a_models_files_that_are_no_json_are_named(
    name: str, content: bytes, model: Path, opened: Callable[[str, bytes], None]
) -> None:
    with pytest.raises(ValueError, match=name) as caught:
        opened(name, content)
    assert is_sentence(caught.value)


SIZES_OF_A_MODEL = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
# Settings of a model's configuration and what none of them can be.
NO_SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(SIZES_OF_A_MODEL, ("x", -1, 1.5, [], {"a": 1}, True, [[1]], 10**15, None)),
    "rms_norm_eps": ("x", -1, [], True, None),
    "quantization_config": ("x", [1], {"a": {"b": []}}, {"quant_method": 3}),
    "rope_scaling": ("x", 3, [1], {"rope_type": "llama3"}, {"rope_type": 3}),
    "rope_parameters": ("x", 3, [1], {"rope_type": "llama3"}, {"rope_type": 3}),
}


@pytest.mark.shows(148)
@pytest.mark.parametrize("key", NO_SETTINGS)
def test_a_setting_of_another_type_is_named(key: str, model: Path, opened: Callable[[str, bytes], None]) -> None:
    usual = json.loads((model / "config.json").read_text())
    if key == "rope_scaling":
        usual["rope_parameters"] = None
    for value in NO_SETTINGS[key]:
        with pytest.raises(ValueError) as caught:
            opened("config.json", json.dumps(usual | {key: value}).encode())
        assert is_sentence(caught.value), value


@pytest.mark.shows(148)
@pytest.mark.parametrize("value", ["x", 1.5, {"a": 1}, True, ["a"], [[1]]])
def test_end_tokens_of_another_type_are_named(value: Any, opened: Callable[[str, bytes], None]) -> None:
    with pytest.raises(ValueError, match="eos_token_id"):
        opened("generation_config.json", json.dumps({"eos_token_id": value}).encode())


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "F99"},
        {"dtype": "I8"},
        {"dtype": 3},
        {"shape": None},
        {"shape": [-1]},
        {"shape": [5]},
        {"data_offsets": [4, 0]},
        {"data_offsets": ["x", "y"]},
        {"data_offsets": [0, 10**15]},
    ],
)
def test_tensors_that_their_header_misstates_are_refused(
    change: dict[str, Any], model: Path, opened: Callable[[str, bytes], None]
) -> None:
    whole = (model / SINGLE_FILE).read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:end])
    header["lm_head.weight"] |= change
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=SINGLE_FILE) as caught:
        opened(SINGLE_FILE, len(text).to_bytes(8, "little") + text + whole[end:])
    assert is_sentence(caught.value)


@pytest.mark.shows(148)
@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_lines_of_texts_and_prompts_that_are_no_json_are_named(content: bytes, model: Path, tmp_path: Path) -> None:
    path, reader = tmp_path / "lines.jsonl", InputReader(open_model(model))
    path.write_bytes(content)
    for read in (reader.texts, reader.prompts):
        with pytest.raises(ValueError, match=r"lines\.jsonl") as caught:
            read(path)
        assert is_sentence(caught.value)


@pytest.mark.shows(148)
@pytest.mark.parametrize("content", [*RAW.values(), b"a = " + b"[" * 100_000, b"a." * 2_000 + b"b = 1"])
def test_settings_that_are_none_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    if content:
        with pytest.raises(ValueError, match=r"run\.toml") as caught:
            read_config(path)
        assert is_sentence(caught.value)
    else:
        assert read_config(path)


def manifest(folder: Path, **changes: Any) -> Path:
    """A checkpoint without files, whose manifest is changed and signed."""
    path = folder / "step-00000003"
    path.mkdir()
    write_manifest(CheckpointInfo(path, 3, {"model": 1}, (None,), {}, {}))
    content = json.loads((path / "manifest.json").read_text()) | changes
    content = {key: value for key, value in content.items() if key != "sha256" and value != "left out"}
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(content))
    return path


MISSTATED: list[dict[str, Any]] = [
    *({key: value} for key in ("step", "identity", "extras", "tensors", "files") for value in ("x", "left out", None)),
    {"tensors": {"a": 3}},
    {"tensors": {"a": {}}},
    {"tensors": {"a": {"shape": "x", "dtype": "float32"}}},
    {"tensors": {"a": {"shape": [1], "dtype": "float32", "of": "b"}}},
    {"files": {"a": {"size": 3}}},
    {"files": {"a": [1, 2]}},
    {"format": "another"},
    {"step": 4},
]


@pytest.mark.shows(148)
@pytest.mark.parametrize("changes", MISSTATED, ids=str)
def test_a_manifest_that_misstates_its_checkpoint_is_a_damaged_one(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint) as caught:
        read_manifest(manifest(tmp_path, **changes))
    assert is_sentence(caught.value)


@pytest.mark.parametrize("extra", [None, 3, "x", [1], {"loader": {"epoch": [1]}}, {"random": 3}, {"step": -1}])
def test_a_users_own_values_are_free(extra: Any, tmp_path: Path) -> None:
    assert read_manifest(manifest(tmp_path, extras=[extra])).rank_values == (extra,)


@pytest.mark.shows(148)
@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_other_files_that_are_no_json_are_refused_or_passed_over(content: bytes, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "step.json", "store.json", "step-00000001/manifest.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    with pytest.raises(ValueError, match="no recorded step"):
        read_recorded_step(tmp_path / "step.json")
    with pytest.raises(CorpusError, match="damaged"):
        load_store("x", tmp_path)
    with pytest.raises(DamagedCheckpoint):
        read_manifest(tmp_path / "step-00000001")
    with pytest.raises(BatchError):
        PackedBatch.from_json(content.decode(errors="replace"))
    for ending in (".csv", ".txt"):
        path = tmp_path / f"schedule{ending}"
        path.write_bytes(content)
        with pytest.raises(ScheduleError, match=path.name):
            files.read_program(path)


@pytest.mark.shows(148)
def test_lines_of_metrics_without_a_whole_step_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": "x"}\n{"step": null}\n{"step": [1]}\n{"step": 1e400}\n[]\n{"step": 7, "loss": 1.0}\n')
    assert read_metrics(path) == [{"step": 7, "loss": 1.0}]


def test_a_token_cache_that_holds_objects_runs_none_of_them(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> Any:
            return (marker.touch, ())

    import numpy as np

    (tmp_path / "store.json").write_text(json.dumps({"dtype": "<u2", "max_token": 1, "fingerprint": "x"}))
    np.save(tmp_path / "offsets.npy", np.array([Hostile()], dtype=object), allow_pickle=True)
    torch.save(Hostile(), tmp_path / "tokens.bin")
    with pytest.raises(CorpusError, match="damaged"):
        load_store("x", tmp_path)
    assert not marker.exists()


SIZES = (
    ["schedule", "show", "1f1b", "--ranks", "1000000000", "--microbatches", "8"],
    ["schedule", "show", "1f1b", "--ranks", "1000000", "--microbatches", "8"],
    ["schedule", "verify", "1f1b", "--ranks", "4", "--microbatches", "1000000000"],
    ["schedule", "compare", "--ranks", "1000000", "--microbatches", "8"],
    ["train", "--dry-run", "--parallel.pp", "1000000"],
    ["train", "--dry-run", "--parallel.dp", "1000000000"],
    ["train", "--dry-run", "--model.num_layers", "1000000000"],
    ["train", "--dry-run", "--model.hidden_size", "1000000000000"],
    ["train", "--dry-run", "--train.num_microbatches", "100000000000"],
    ["train", "--dry-run", "--experts.num_experts", "1000000000"],
)


@pytest.mark.shows(148)
@pytest.mark.parametrize("arguments", SIZES, ids=" ".join)
def test_sizes_are_refused_before_any_work(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    if arguments[0] == "train":
        arguments = ["train", "examples/tiny.toml", *arguments[1:]]
    # Of this process alone: how busy the machine is does not count.
    begun_s = time.process_time()
    assert main(arguments) == 2
    assert time.process_time() - begun_s < 1.0
    assert capsys.readouterr().err.count("\n") == 1

"""A folder that cannot be read is refused in one sentence, before any value is read; nothing but safetensors is."""

import json
import re
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from penstock import Engine
from penstock.engine import EngineOptions
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.model.hf.families import config_from_json, config_to_json, names_of, read_config_json
from penstock.model.hf.files import INDEX_FILE, SINGLE_FILE, WeightFiles, units_from_files
from penstock.model.units import PlannedGroup
from penstock.parallel.tensor_slice import Shard, StoredSlice, copies
from penstock.settings import ExpertConfig, ModelConfig, RopeKind, RopeScaling
from tests.forged import change_header
from tests.hugging_face import make_model

BASE = ModelConfig(
    vocab_size=97, hidden_size=32, intermediate_size=56, num_layers=3, num_heads=4, num_kv_heads=2, max_length=64
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model in several files."""
    make_model("llama").save_pretrained(tmp_path / "model", max_shard_size="20KB")
    return tmp_path / "model"


def edit(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in (content | changes).items() if value is not None}))


def first_file(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[0]


def refusal(folder: Path, kind: type[Exception] = ValueError, native: bool = True) -> str:
    """The one sentence with which the folder is refused."""
    with pytest.raises(kind) as caught:
        Engine.from_hf(folder, options=EngineOptions(device="cpu"), native=native)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["I32", "U32"])
@pytest.mark.parametrize("native", [True, False])
def test_weights_of_whole_numbers_are_refused(dtype: str, native: bool, tmp_path: Path) -> None:
    folder = tmp_path / "single"
    make_model("llama").save_pretrained(folder)
    change_header(folder / SINGLE_FILE, lambda header: header["lm_head.weight"].update(dtype=dtype))
    assert f"is of the type {dtype}, which is not read as torch.float32" in refusal(folder, native=native)


@pytest.mark.shows(97)
def test_missing_files_are_named_with_their_path(folder: Path) -> None:
    assert str(folder / "no") in refusal(folder / "no", FileNotFoundError)
    lost = first_file(folder)
    lost.unlink()
    assert str(lost) in refusal(folder, FileNotFoundError)
    (folder / INDEX_FILE).unlink()
    assert str(folder / SINGLE_FILE) in refusal(folder, FileNotFoundError)
    (folder / "config.json").unlink()
    assert str(folder / "config.json") in refusal(folder, FileNotFoundError)


def test_files_that_were_cut_short_are_named(folder: Path) -> None:
    path = first_file(folder)
    whole = path.read_bytes()
    for length in (0, 4, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert str(path) in refusal(folder)
    path.write_bytes(whole + b"x")
    assert str(path) in refusal(folder)


def test_wrong_shapes_missing_and_surplus_tensors_are_named(folder: Path) -> None:
    path = first_file(folder)
    # Not mapped from the file, which is written again.
    tensors = load(path.read_bytes())
    name = min(tensors)
    save_file(tensors | {name: torch.zeros(3, 5)}, path)
    assert name in refusal(folder)
    assert "[3, 5]" in refusal(folder)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, path)
    index = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
    edit(folder / INDEX_FILE, weight_map=index | {"model.layers.0.self_attn.q_proj.bias": path.name})
    assert "model.layers.0.self_attn.q_proj.bias" in refusal(folder)
    save_file({key: value for key, value in tensors.items() if key != name}, path)
    assert name in refusal(folder)
    edit(folder / INDEX_FILE, weight_map={key: file for key, file in index.items() if key != name})
    assert name in refusal(folder)


@pytest.mark.shows(149)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json", "sub/anything"])
def test_links_out_of_the_folder_are_refused(folder: Path, name: str) -> None:
    private = folder.parent / "private"
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    if link.exists():
        link.rename(private)
    else:
        private.write_text("{}")
    link.symlink_to(private)
    for native in (True, False):
        told = refusal(folder, native=native)
        assert str(link) in told and str(private) in told


@pytest.mark.shows(149)
def test_a_model_in_the_cache_of_hugging_face_is_read_through_its_links(folder: Path) -> None:
    cache = folder.parent / "models--maker--model"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    files = sorted(folder.iterdir())
    assert files
    for number, file in enumerate(files):
        file.rename(cache / "blobs" / str(number))
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", str(number)))
    assert Engine.from_hf(snapshot, options=EngineOptions(device="cpu")).state
    # The same links, of which one leaves the model's part of the cache.
    (snapshot / "config.json").unlink()
    (folder.parent / "config.json").write_bytes(
        (cache / "blobs" / str(files.index(folder / "config.json"))).read_bytes()
    )
    (snapshot / "config.json").symlink_to(Path("..", "..", "..", "config.json"))
    assert str(snapshot / "config.json") in refusal(snapshot)


def test_unknown_architectures_and_settings_are_named_with_what_is_possible(folder: Path) -> None:
    edit(folder / "config.json", architectures=["MambaForCausalLM"])
    message = refusal(folder)
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message
    assert "native=False" in message
    edit(folder / "config.json", architectures=["LlamaForSequenceClassification"])
    assert "the decoder is none of LlamaForSequenceClassification" in refusal(folder)
    edit(folder / "config.json", architectures=["LlamaForCausalLM"], hidden_act="gelu")
    assert "hidden_act" in refusal(folder)
    edit(folder / "config.json", hidden_act="silu", rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    assert "dynamic" in refusal(folder)
    edit(folder / "config.json", rope_parameters=None, hidden_size=None)
    assert "hidden_size" in refusal(folder)
    edit(folder / "config.json", hidden_size=32, model_type="no-such-model")
    assert "no-such-model" in refusal(folder, native=False)
    edit(folder / "config.json", model_type="llama", hidden_act=5)
    assert re.search("field 'hidden_act': .*expected str, got int", refusal(folder, native=False))


@pytest.mark.shows(98)
@pytest.mark.parametrize("place", [0, 1])
def test_a_rank_reads_its_own_part_of_its_own_tensors_and_holds_one_at_a_time(
    tmp_path: Path, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("mixtral", num_local_experts=5, num_experts_per_tok=2)
    model.save_pretrained(tmp_path)
    config, files = config_from_json(read_config_json(tmp_path)), WeightFiles.open(tmp_path)
    group = cast(ProcessGroup, PlannedGroup(2, place))
    units = units_from_files(decoder_units(config, groups=ModelGroups(ep=group)), names_of(config), files)
    read, held, read_bytes = WeightFiles.read, list[weakref.ref[Tensor]](), 0

    def watched(files: WeightFiles, name: str, part: tuple[slice, ...] = ()) -> Tensor:
        nonlocal read_bytes
        assert all(ref() is None for ref in held), "two tensors are held at once"
        tensor = read(files, name, part)
        held.append(weakref.ref(tensor))
        read_bytes += tensor.nbytes
        return tensor

    monkeypatch.setattr(WeightFiles, "read", watched)
    num_shared = 0
    for unit in units[1:4]:
        read_bytes = 0
        module = built(unit)
        assert read_bytes == sum(p.nbytes for p in module.parameters())
        for name, shard in unit.sharding.items():
            whole = model.get_parameter(THEIRS[name])
            assert torch.equal(module.get_parameter(name), shard.of(whole))
            num_shared += 1
    assert num_shared
    assert len(held) > len(units)


THEIRS = {
    "experts.gate_up.weight": "model.layers.0.mlp.experts.gate_up_proj",
    "experts.down.weight": "model.layers.0.mlp.experts.down_proj",
}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stored_slices_meet_any_part_of_a_parameter(dim: int, count: int) -> None:
    whole = torch.arange(4 * 6 * 5).view(4, 6, 5)
    shape = tuple(whole.shape)
    stored = [
        StoredSlice.at(f"{e} {half}", shape, e, slice(3 * half, 3 * half + 3)) for e in range(4) for half in range(2)
    ]
    values = {one.name: one.part.of(whole).view(one.shape) for one in stored}
    for index in range(count):
        shard = Shard("tp", dim, index, count, shape)
        part = torch.full(shard.part.shape, -1)
        for name, indices, into in copies(stored, shard.part, part):
            into.copy_(values[name][indices])
        assert torch.equal(part, shard.of(whole))


@pytest.mark.parametrize(
    "config",
    [
        BASE,
        replace(BASE, qkv_bias=True, sliding_window=5, num_full_layers=2),
        replace(BASE, qk_norm=True, head_dim=16, tie_embeddings=True),
        replace(BASE, sliding_window=5, rope_scaling=RopeScaling(RopeKind.LLAMA3, 8.0, 32)),
        replace(BASE, rope_scaling=RopeScaling(RopeKind.YARN, 4.0, 32, 1.0, 32.0, 1.5, False)),
        replace(BASE, intermediate_size=24, experts=ExpertConfig(6, 2, 24)),
        replace(BASE, qk_norm=True, experts=ExpertConfig(6, 2, 24, normalise=False, dense_layers=(1,))),
        replace(BASE, qkv_bias=True, experts=ExpertConfig(6, 2, 24, shared_size=40, shared_gate=True)),
    ],
)
def test_a_decoder_reads_back_from_the_config_json_that_it_writes(config: ModelConfig) -> None:
    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config.whole(97)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("num_key_value_heads", "num_kv_heads"),
        ("head_dim", "head_dim"),
        ("max_position_embeddings", "max_length"),
        ("rope_theta", "rope_theta"),
    ],
)
def test_a_size_of_0_is_refused_and_null_is_one_that_transformers_works_out(key: str, ours: str) -> None:
    content = config_to_json(BASE)
    with pytest.raises(ValueError, match=rf"{ours} = 0(\.0)? is not possible"):
        config_from_json({**content, key: 0})
    if key in ("num_key_value_heads", "head_dim"):
        assert config_from_json({**content, key: None}).num_layers == BASE.num_layers
        return
    with pytest.raises(ValueError, match=f"{ours} = None: expected "):
        config_from_json({**content, key: None})


def test_a_decoder_that_no_family_is_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="qkv_bias=True, qk_norm=True"):
        config_to_json(replace(BASE, qkv_bias=True, qk_norm=True))


def built(unit: UnitSpec) -> torch.nn.Module:
    with torch.device("meta"):
        module = unit.build()
    unit.initialise(module, 0)
    return module

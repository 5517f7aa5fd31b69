"""Every key of the native families' config.json is honoured, or the model runs by transformers' own layers.

Values are drawn for every key that transformers' class of a family has, in both forms that files have, and some are
left out; logits are those of transformers.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from penstock import Engine, EngineOptions, OptimizerConfig, PackedBatch
from penstock.engine.folders.model_folder import open_folder
from penstock.model.hf.families import _USUAL, FAMILIES
from penstock.settings import ConfigError
from tests.hugging_face import SIZES, make_model, make_sequences, reference_logits, stored_tensors

pytestmark = pytest.mark.subject(
    "src/penstock/model/**/*.py", "src/penstock/engine/folders/*.py", "src/penstock/settings/*.py", "constraints.txt"
)

DRAWS = 12
NO_DECAY = OptimizerConfig(weight_decay=0.0)
LENGTHS = (7, 1, 19)
NUM_LAYERS = SIZES["num_hidden_layers"]
YARN = {"rope_type": "yarn", "factor": 4.0}
ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 5e5},
    {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 16},
    YARN,
    YARN | {"original_max_position_embeddings": 8, "attention_factor": 1.3},
    YARN | {"original_max_position_embeddings": 16, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    YARN | {"original_max_position_embeddings": 16, "mscale": 0.7, "mscale_all_dim": 0.5},
]
#: of each key that changes numbers, values beside that of the class
VALUES: dict[str, list[Any]] = {
    "hidden_act": ["gelu"],
    "attention_bias": [True],
    "mlp_bias": [True],
    "qkv_bias": [False],
    "attention_dropout": [0.1],
    "router_jitter_noise": [0.1],
    "output_router_logits": [True],
    "rms_norm_eps": [1e-3],
    "tie_word_embeddings": [True],
    "max_position_embeddings": [128],
    "num_key_value_heads": [1, 4],
    "head_dim": [4, 16],
    "rope_parameters": ROPES,
    "use_sliding_window": [True],
    "sliding_window": [3, 5],
    "max_window_layers": [0, 1, NUM_LAYERS],
    "layer_types": [["full_attention", *["sliding_attention"] * (NUM_LAYERS - 1)]],
    "norm_topk_prob": [True],
    "decoder_sparse_step": [2],
    "mlp_only_layers": [[1]],
    "num_experts_per_tok": [1, 2],
    "shared_expert_intermediate_size": [24],
    "moe_intermediate_size": [24],
    "router_aux_loss_coef": [0.5],
    "pad_token_id": [3, SIZES["vocab_size"] - 1],
}
#: those that change no number of a model that is built, and the sizes that each model here has
OTHERS = {
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_experts", "num_local_experts", "initializer_range", "use_cache", "pretraining_tp"),
    *("bos_token_id", "eos_token_id"),
}
#: those that say themselves what they are, that change no output, or that a file must have
UNREAD = {
    *("rope_parameters", "layer_types", "head_dim", "num_key_value_heads", "output_router_logits"),
    *("router_aux_loss_coef", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
}
#: those whose default fits the weights of any value
LEFT_OUT = ("rms_norm_eps", "sliding_window", "max_window_layers", "norm_topk_prob", "max_position_embeddings")
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
# transformers itself needs a head's width of a Mixtral, for all rotations but the plain one.
EXPERTS = {"mixtral": {"num_local_experts": 4, "head_dim": 8}, "qwen2_moe": FEW, "qwen3_moe": FEW}


def keys_of(model_type: str) -> set[str]:
    return CONFIG_MAPPING[model_type]().to_dict().keys() - PreTrainedConfig().to_dict().keys()


def drawn_folder(model_type: str, draw: int, folder: Path) -> dict[str, Any]:
    """A model with some keys drawn; returns these."""
    rng = random.Random(f"{model_type} {draw}")
    possible = sorted(keys_of(model_type) & VALUES.keys())
    # Each by itself at least once, then several together.
    names = [possible[draw]] if draw < len(possible) else rng.sample(possible, 4)
    if "sliding_window" in names and "use_sliding_window" in possible:
        names.append("use_sliding_window")
    if {"layer_types", "max_window_layers", "use_sliding_window"} & set(names):
        names += ["use_sliding_window", "sliding_window"]
    drawn = {name: rng.choice(VALUES[name]) for name in dict.fromkeys(names)}
    make_model(model_type, **EXPERTS.get(model_type, {}) | drawn).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    form = rng.choice(["new", "old", "both"])
    if form != "new":
        rope = content["rope_parameters"] if form == "both" else content.pop("rope_parameters")
        content["rope_theta"] = rope["rope_theta"]
        content["rope_scaling"] = None if rope["rope_type"] == "default" else {**rope, "type": rope["rope_type"]}
    if form == "both":
        # transformers 5 goes by this one.
        content["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    for key in LEFT_OUT:
        if key not in drawn and rng.random() < 0.5:
            content.pop(key, None)
    if rng.random() < 0.5 and "layer_types" not in drawn:
        content.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(content))
    return drawn


@pytest.mark.shows(200)
def test_every_key_of_every_family_is_known_and_has_its_usual_value() -> None:
    for family in FAMILIES.values():
        kind: Any = CONFIG_MAPPING[family.model_type]
        assert keys_of(family.model_type) <= VALUES.keys() | OTHERS, "and drawn"
        usual = _USUAL | dict(family.usual)
        assert keys_of(family.model_type) <= usual.keys() | OTHERS | UNREAD, family.model_type
        for key, value in usual.items():
            known = kind.default_theta if key == "rope_theta" else getattr(kind, key, value)
            assert value == known, (family.model_type, key)


@pytest.mark.shows(200)
@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES.values()])
def test_logits_are_those_of_transformers_whatever_the_keys_say(model_type: str, tmp_path: Path) -> None:
    num_native, sequences = 0, make_sequences(LENGTHS)
    batch = PackedBatch.from_documents(sequences)
    num_keys = len(keys_of(model_type) & VALUES.keys())
    for draw in range(num_keys + DRAWS):
        folder = tmp_path / str(draw)
        drawn = drawn_folder(model_type, draw, folder)
        because = open_folder(folder, "auto").transformers_because
        num_native += because is None
        engine = Engine.from_hf(folder, native="auto", learns=False)
        logits, expected = engine.forward(batch), reference_logits(folder, sequences)
        engine.close()
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4, msg=f"{drawn} {because}")
        # These count in training, where transformers' layers have them.
        assert because is not None or not {"attention_dropout", "router_jitter_noise"} & drawn.keys(), drawn
        if "output_router_logits" in drawn:
            with pytest.raises(ConfigError, match="asks for a loss of all routers together"):
                Engine.from_hf(folder, native="auto")
    assert num_native > num_keys / 3


@pytest.mark.shows(200)
@pytest.mark.parametrize("model_type", [family.model_type for family in FAMILIES.values()])
def test_gradients_are_those_of_transformers_whatever_the_keys_say(model_type: str, tmp_path: Path) -> None:
    sequences, num_native = make_sequences(LENGTHS), 0
    num_keys = len(keys_of(model_type) & VALUES.keys())
    for number in range(num_keys):
        folder = tmp_path / str(number)
        drawn = drawn_folder(model_type, number, folder)
        if drawn.keys() & {"attention_dropout", "router_jitter_noise", "output_router_logits"}:
            continue
        content = json.loads((folder / "config.json").read_text())
        # One that is trained on, by its place or counted from the end.
        content["pad_token_id"] = int(sequences[0][number % 3]) - (number % 2) * SIZES["vocab_size"]
        (folder / "config.json").write_text(json.dumps(content))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        num_tokens = sum(len(sequence) - 1 for sequence in sequences)
        for sequence in sequences:
            logits = model(sequence[None]).logits[0, :-1]
            (functional.cross_entropy(logits, sequence[1:], reduction="sum") / num_tokens).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        expected = torch.stack([gradient.double().norm() for gradient in gradients]).norm().item()
        engine = Engine.from_hf(folder, native="auto", options=EngineOptions(optimizer=NO_DECAY))
        num_native += open_folder(folder, "auto").transformers_because is None
        result = engine.train_batch(PackedBatch.from_documents(sequences))
        engine.close()
        assert result.grad_norm == pytest.approx(expected, rel=1e-4), drawn
    assert num_native > num_keys / 3


@pytest.mark.shows(200)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"layer_types": ["full_attention"] * NUM_LAYERS, "sliding_window": 3}),
        ("mistral", {"use_sliding_window": False, "sliding_window": 3}),
        ("mixtral", {"use_sliding_window": False, "sliding_window": 3}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 3, "max_window_layers": 0, "layer_types": None}),
        ("qwen3_moe", {"use_sliding_window": False, "sliding_window": 3}),
        ("mixtral", {"num_experts_per_tok": None}),
        ("llama", {"is_causal": False}),
        ("llama", {"rope_parameters": None, "rope_scaling": YARN | {"factor": None}}),
        ("qwen3", {"rope_parameters": None, "rope_scaling": YARN | {"attention_factor": 0.0}}),
    ],
)
def test_what_a_class_does_not_list_or_a_file_leaves_out_is_read_as_there(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder, sequences = tmp_path / "model", make_sequences(LENGTHS)
    make_model(model_type, **EXPERTS.get(model_type, {})).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content |= {key: value for key, value in changes.items() if value is not None}
    for key in [key for key, value in changes.items() if value is None]:
        content.pop(key, None)
    (folder / "config.json").write_text(json.dumps(content))
    engine = Engine.from_hf(folder, native="auto", learns=False)
    logits, expected = engine.forward(PackedBatch.from_documents(sequences)), reference_logits(folder, sequences)
    engine.close()
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.shows(201)
@pytest.mark.parametrize("native", [True, False], ids=["native", "transformers"])
@pytest.mark.parametrize("model_type", ["llama", "qwen2_moe"])
def test_a_head_of_its_own_in_a_tied_folder_is_read_and_kept(native: bool, model_type: str, tmp_path: Path) -> None:
    folder, sequences = tmp_path / "model", make_sequences(LENGTHS)
    make_model(model_type, **EXPERTS.get(model_type, {}), tie_word_embeddings=True).save_pretrained(folder)
    tensors = stored_tensors(folder)
    tied = reference_logits(folder, sequences)
    unseen = sorted({*range(SIZES["vocab_size"])} - {int(token) for sequence in sequences for token in sequence})
    assert unseen
    for is_apart in (False, True):
        head = tensors["model.embed_tokens.weight"].clone()
        save_file(
            tensors | {"lm_head.weight": head.roll(int(is_apart))}, folder / "model.safetensors", {"format": "pt"}
        )
        expected = reference_logits(folder, sequences)
        assert torch.equal(expected, tied) is not is_apart, "transformers reads it"
        engine = Engine.from_hf(folder, native=native, options=EngineOptions(optimizer=NO_DECAY))
        logits = engine.forward(PackedBatch.from_documents(sequences))
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        engine.save_hf(written := tmp_path / f"written {is_apart}")
        assert json.loads((written / "config.json").read_text())["tie_word_embeddings"] is not is_apart
        engine.train_batch(PackedBatch.from_documents(sequences))
        engine.save_hf(trained := tmp_path / f"trained {is_apart}")
        after = stored_tensors(trained)
        rows = after["model.embed_tokens.weight"]
        assert torch.equal(after.get("lm_head.weight", rows), rows) is not is_apart
        assert is_apart is bool((rows == tensors["model.embed_tokens.weight"])[unseen].all()), "of tokens not seen"
        engine.close()
        torch.testing.assert_close(reference_logits(written, sequences), expected, rtol=1e-4, atol=1e-4)

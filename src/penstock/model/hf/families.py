"""The families of Hugging Face models that the decoder can be: their parameters' names, and their config.json.

A family is a row of `FAMILIES`; a kind of parameter is a row of a table of names.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.io.files import read_json_object
from penstock.model.hf.files import MissingFile, Names, is_quantized, refuse_unfit_files
from penstock.parallel.tensor_slice import Shape, StoredSlice
from penstock.settings import ConfigError, ExpertConfig, ModelConfig, RopeKind, RopeScaling, Scores

STORED_EMBEDDING, STORED_HEAD = "model.embed_tokens.weight", "lm_head.weight"
_OUTSIDE = {
    "embedding.weight": STORED_EMBEDDING,
    "head.norm.weight": "model.norm.weight",
    "head.projection.weight": STORED_HEAD,
}
_OF_LAYER = {
    "attention.norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.output": "self_attn.o_proj",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_OF_EXPERTS = {
    "mlp.router.logits": "gate",
    "mlp.shared.gate": "shared_expert.gate_proj",
    "mlp.shared.up": "shared_expert.up_proj",
    "mlp.shared.down": "shared_expert.down_proj",
    "mlp.shared.scale": "shared_expert_gate",
}


# An expert's parameters, each of which has one or two of its matrices, one after the other.
_OF_EACH_EXPERT = {"mlp.experts.down": ("down",), "mlp.experts.gate_up": ("gate", "up")}
# The block with a layer's experts, and each expert's three matrices.
MIXTRAL_EXPERTS = {"block": "block_sparse_moe", "gate": "w1", "up": "w3", "down": "w2"}
QWEN_EXPERTS = {"block": "mlp", "gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


class Windows(enum.Enum):
    """The layers of a family that use the sliding window, if config.json gives one."""

    NEVER = enum.auto()
    ALL = enum.auto()
    IF_USED = enum.auto()
    """All, if "use_sliding_window" is set."""
    LATER = enum.auto()
    """If "use_sliding_window" is set, those that "layer_types" names, or else those from "max_window_layers" on."""
    ALTERNATE = enum.auto()
    """As `LATER`, but where none are named every other one before "max_window_layers"."""


@dataclass(frozen=True)
class Family:
    """The switches in which families differ.

    usual: the values that transformers' class of the family has of keys that a config.json leaves out, beside `_USUAL`.
    """

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Windows = Windows.NEVER
    experts: Mapping[str, str] | None = None
    shared_expert: bool = False
    usual: Mapping[str, Any] = field(default_factory=dict)

    def fits(self, config: ModelConfig) -> bool:
        """True if a model of this family can be that decoder."""
        named = {Windows.LATER, Windows.ALTERNATE}
        kinds = named if config.num_full_layers else {Windows.ALL, Windows.IF_USED, *named}
        windows = config.sliding_window is None or self.windows in kinds
        layers = (self.qkv_bias, self.qk_norm) == (config.qkv_bias, config.qk_norm)
        experts = config.experts
        # Layers that predict further tokens have no place in these families' files.
        if not windows or not layers or config.num_predictions or bool(experts.num_experts) != bool(self.experts):
            return False
        if self.experts is None:
            return True
        plain = (experts.scores, experts.num_groups, experts.scaling_factor) == (Scores.SOFTMAX, 1, 1.0)
        shared = experts.shared_gate if self.shared_expert else experts.shared_size == 0
        everywhere = experts.normalise and all(map(experts.is_sparse, range(config.num_layers)))
        # A bias for the choice of experts has no place in these families' files.
        return plain and shared and not experts.bias_step and (everywhere or self.experts is not MIXTRAL_EXPERTS)


_USUAL = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "max_position_embeddings": 32768,
    "pad_token_id": None,
    "is_causal": True,
}
_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_SPARSE = {"norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None}
_LONG = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
FAMILIES = {
    "LlamaForCausalLM": Family(
        "llama", usual={"attention_bias": False, "mlp_bias": False, "max_position_embeddings": 2048}
    ),
    "MistralForCausalLM": Family("mistral", windows=Windows.ALL, usual=_LONG | {"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family(
        "qwen2", qkv_bias=True, windows=Windows.LATER, usual=_WINDOW | {"num_key_value_heads": 32}
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qk_norm=True,
        windows=Windows.LATER,
        usual=_WINDOW | {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False},
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        windows=Windows.ALL,
        experts=MIXTRAL_EXPERTS,
        usual=_LONG | {"sliding_window": None, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "router_jitter_noise": 0.0},
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        qkv_bias=True,
        windows=Windows.ALTERNATE,
        experts=QWEN_EXPERTS,
        shared_expert=True,
        usual=_WINDOW | _SPARSE | {"num_key_value_heads": 16, "qkv_bias": True},
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        qk_norm=True,
        windows=Windows.IF_USED,
        experts=QWEN_EXPERTS,
        usual=_WINDOW | _SPARSE | {"num_key_value_heads": 4, "attention_bias": False},
    ),
}


@dataclass(frozen=True)
class NativeNames(Names):
    """The names of the decoder's parameters in a family's files, and of tensors there that are not parameters."""

    tied: bool
    experts: Mapping[str, str] | None = None

    def slices(self, full_name: str, shape: Shape) -> tuple[StoredSlice, ...]:
        """As of all names; none for parameters that only training uses, which the files have no place for."""
        if full_name in _OUTSIDE:
            return (StoredSlice.at(_OUTSIDE[full_name], shape),)
        layers, number, rest = full_name.split(".", 2)
        if layers != "layers":
            return ()
        module, _, kind = rest.rpartition(".")
        layer = f"model.layers.{number}"
        if module in _OF_LAYER:
            return (StoredSlice.at(f"{layer}.{_OF_LAYER[module]}.{kind}", shape),)
        assert self.experts is not None, full_name
        block = f"{layer}.{self.experts['block']}"
        if module in _OF_EXPERTS:
            return (StoredSlice.at(f"{block}.{_OF_EXPERTS[module]}.{kind}", shape),)
        matrices = _OF_EACH_EXPERT.get(module)
        if matrices is None:
            return ()
        size = shape[1] // len(matrices)
        return tuple(
            StoredSlice.at(
                f"{block}.experts.{expert}.{self.experts[matrix]}.weight",
                shape,
                expert,
                slice(i * size, (i + 1) * size),
            )
            for expert in range(shape[0])
            for i, matrix in enumerate(matrices)
        )

    def is_surplus(self, stored: str) -> bool:
        """True for a stored tensor that no parameter needs: a table of frequencies, or a tied head's copy."""
        return stored.endswith("rotary_emb.inv_freq") or (self.tied and stored == STORED_HEAD)


def names_of(config: ModelConfig) -> NativeNames:
    """The names of that decoder's parameters in the files of its family (of any family if none is that decoder)."""
    family = next((family for family in FAMILIES.values() if family.fits(config)), None)
    return NativeNames(config.tie_embeddings, family.experts if family else QWEN_EXPERTS)


# ---- config.json of a folder, read as the decoder's settings and written


CONFIG_FILE = "config.json"
GENERATION_CONFIG = "generation_config.json"
_OTHERWISE = "native=False (--native false, model.native = false) runs transformers' own layers"


class NotNative(ValueError):
    """A model that the decoder is not, although transformers may know it."""


@dataclass(frozen=True)
class HuggingFaceForm:
    """The form of a model in transformers: its names there, its config.json, and the folder it came from.

    `describe` makes the config.json, and raises ValueError where no family of transformers is the model. `folder` is
    where tokenizer files are copied from; None where the model was made here. `bytes_end`: whether a model of bytes
    has an end token; None for other models.
    """

    names: Names
    describe: Callable[[], Mapping[str, Any]]
    folder: Path | None = None
    bytes_end: bool | None = None

    @classmethod
    def of(cls, config: ModelConfig) -> HuggingFaceForm:
        """The form of a decoder that was made here."""
        return cls(names_of(config), lambda: config_to_json(config))


def read_config_json(folder: Path) -> dict[str, Any]:
    """Read the folder's config.json.

    Raises:
        MissingFile: the folder or the file is missing; names its path.
        ValueError: it is not a JSON object, a link in the folder leads out of it, or its weights are quantized in a
            form that is not read.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise MissingFile(f"there is no folder {folder} to read a model from")
    refuse_unfit_files(folder)
    if not path.is_file():
        raise MissingFile(f"{path} is missing: a model's folder has one")
    content = read_json_object(path)
    try:
        is_quantized(content)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return content


def architecture(content: Mapping[str, Any]) -> str:
    """The name of the model's class, from "architectures" or else "model_type"."""
    named = content.get("architectures")
    if named and isinstance(named, list):
        return str(named[0])
    types = {family.model_type: name for name, family in FAMILIES.items()}
    return types.get(str(content.get("model_type")), f"model_type {content.get('model_type')!r}")


def config_from_json(content: Mapping[str, Any]) -> ModelConfig:
    """Read the decoder that a config.json describes.

    Raises:
        NotNative: a ValueError for another architecture, or settings that the decoder does not have; names the possible
            ones. What transformers makes of them is for transformers to say.
    """
    name = architecture(content)
    if name not in FAMILIES:
        raise NotNative(f"the decoder is none of {name}; it is {', '.join(FAMILIES)}, and {_OTHERWISE}")
    family = FAMILIES[name]
    if (kind := content.get("model_type", family.model_type)) != family.model_type:
        raise NotNative(f"{name} with model_type={kind!r} is not the decoder's; {_OTHERWISE}")
    try:
        values = {**_USUAL, **family.usual, **content}
        for key, usual in (_USUAL | dict(family.usual)).items():
            if key not in _READ and values[key] != usual:
                raise NotNative(f"{name} with {key}={values[key]!r} is not the decoder's ({usual!r} is); {_OTHERWISE}")
        return _decoder(values, family)
    except (TypeError, LookupError, AttributeError) as error:
        reason = f"lacks {error}" if isinstance(error, KeyError) else f"has a value of another type ({error})"
        raise NotNative(f"the {CONFIG_FILE} of a {name} {reason}; {_OTHERWISE}") from None


def _decoder(values: Mapping[str, Any], family: Family) -> ModelConfig:
    window, num_full_layers = _window(values, family)
    rope, sizes = _rope(values), {ours: values[theirs] for ours, theirs in _SIZES.items()}
    sizes |= {ours: values[theirs] for ours, theirs in _MORE.items() if theirs in values}
    if (padding := sizes["padding_token"]) is not None and padding < 0:
        sizes["padding_token"] += sizes["vocab_size"]  # counted from the end, as in `nn.Embedding`
    shape = ModelConfig(
        **sizes,
        rope_theta=rope["rope_theta"],
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        sliding_window=window,
        num_full_layers=num_full_layers,
        rope_scaling=_scaling(rope),
        experts=_experts(values, family),
    )
    return shape.whole(shape.vocabulary)


_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
_MORE = {
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "padding_token": "pad_token_id",
}
"""Settings that a config.json must have, and those that it may leave out: their names here and there."""
_READ = {
    *_MORE.values(),
    *("rope_theta", "sliding_window", "use_sliding_window", "max_window_layers"),
    *("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers"),
}
"""The keys that the decoder honours. With another value than the usual one of any other a model is not the decoder."""
_ROPE_KINDS = [kind.value for kind in RopeKind if kind is not RopeKind.NONE]
_SLIDING = "sliding_attention"


def config_to_json(config: ModelConfig) -> dict[str, Any]:
    """Write a config.json that transformers can read, for a decoder that was not imported.

    Raises:
        ValueError: no family is this decoder.
    """
    name = next((name for name, family in FAMILIES.items() if family.fits(config)), None)
    if name is None:
        raise ValueError(
            f"none of {', '.join(FAMILIES)} is a decoder with qkv_bias={config.qkv_bias}, qk_norm={config.qk_norm} "
            f"and sliding_window={config.sliding_window}, so it cannot be written for transformers"
        )
    family = FAMILIES[name]
    content: dict[str, Any] = {
        "architectures": [name],
        "model_type": family.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in (_SIZES | _MORE).items()},
        "num_key_value_heads": config.key_heads,
        "head_dim": config.head_size,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "rope_scaling": _scaling_to_json(config.rope_scaling),
    }
    if family.windows is not Windows.NEVER:
        content["sliding_window"] = config.sliding_window
    if family.windows not in (Windows.NEVER, Windows.ALL):
        content["use_sliding_window"] = config.sliding_window is not None
        content["max_window_layers"] = config.num_full_layers if config.sliding_window else config.num_layers
    if family.windows in (Windows.LATER, Windows.ALTERNATE) and config.sliding_window:
        num_full, num_sliding = config.num_full_layers, config.num_layers - config.num_full_layers
        content["layer_types"] = ["full_attention"] * num_full + [_SLIDING] * num_sliding
    if config.experts.num_experts:
        content |= _experts_to_json(config, config.experts, family)
    return content


def _window(values: Mapping[str, Any], family: Family) -> tuple[int | None, int]:
    """The sliding window, and the number of first layers that have full attention in spite of it."""
    # Where a family has no such key, transformers takes no notice of it; but it makes a Ministral of a Mistral.
    if family.windows not in (Windows.LATER, Windows.ALTERNATE) and values.get("layer_types") is not None:
        raise NotNative(f"layer_types of a {family.model_type} are not the decoder's; {_OTHERWISE}")
    is_used = family.windows is Windows.ALL or (family.windows is not Windows.NEVER and values["use_sliding_window"])
    window = (values["sliding_window"] or None) if is_used else None
    if window is None or family.windows in (Windows.ALL, Windows.IF_USED):
        return window, 0
    numbers, end = range(values["num_hidden_layers"]), values["max_window_layers"]
    alternate = family.windows is Windows.ALTERNATE
    slides = [number < end and number % 2 == 0 if alternate else number >= end for number in numbers]
    if values.get("layer_types") is not None:
        slides = [kind == _SLIDING for kind in values["layer_types"]]
    num_full = slides.index(True) if True in slides else len(slides)
    if not all(slides[num_full:]):
        raise NotNative(f"its layers' windows alternate, but the decoder's first layers see everything; {_OTHERWISE}")
    return (window, num_full) if num_full < len(slides) else (None, 0)


def _rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, in whichever form a file has them, as transformers reads them."""
    rope = dict(values.get("rope_scaling") or values.get("rope_parameters") or {})
    rope.setdefault("rope_theta", values["rope_theta"])
    rope.setdefault("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)
    rope.setdefault("rope_type", rope.get("type", "default"))
    if "original_max_position_embeddings" in values:
        rope["original_max_position_embeddings"] = values["original_max_position_embeddings"]
    elif rope["rope_type"] in ("llama3", "yarn"):
        rope.setdefault("original_max_position_embeddings", values["max_position_embeddings"])
    return rope


def _scaling(rope: Mapping[str, Any]) -> RopeScaling:
    kind = rope["rope_type"]
    for key, usual in (("mscale", None), ("mscale_all_dim", None), ("partial_rotary_factor", 1.0)):
        if rope.get(key, usual) != usual:
            raise NotNative(f"rope scaling with {key}={rope[key]!r} is not the decoder's; {_OTHERWISE}")
    if kind == "default":
        return RopeScaling()
    if kind not in _ROPE_KINDS:
        known = ", ".join(_ROPE_KINDS)
        raise NotNative(f"rope scaling {kind!r} is not the decoder's; it has default, {known}, and {_OTHERWISE}")
    low, high = (1.0, 4.0) if kind == "llama3" else (1.0, 32.0)
    try:
        return RopeScaling(
            RopeKind(kind),
            factor=float(rope["factor"]),
            original_length=rope.get("original_max_position_embeddings") or None,
            low=float(rope.get("low_freq_factor") or rope.get("beta_slow") or low),
            high=float(rope.get("high_freq_factor") or rope.get("beta_fast") or high),
            attention_factor=rope.get("attention_factor"),
            truncate=rope.get("truncate", True),
        )
    except ConfigError as error:
        raise NotNative(f"{error}; {_OTHERWISE}") from None


def _scaling_to_json(scaling: RopeScaling) -> dict[str, Any] | None:
    if scaling.kind is RopeKind.NONE:
        return None
    content: dict[str, Any] = {"rope_type": scaling.kind.value, "factor": scaling.factor}
    if scaling.kind is RopeKind.LINEAR:
        return content
    content["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind is RopeKind.LLAMA3:
        return content | {"low_freq_factor": scaling.low, "high_freq_factor": scaling.upper}
    content |= {"beta_slow": scaling.low, "beta_fast": scaling.upper, "truncate": scaling.truncate}
    return content if scaling.attention_factor is None else content | {"attention_factor": scaling.attention_factor}


def _experts(values: Mapping[str, Any], family: Family) -> ExpertConfig:
    if family.experts is None:
        return ExpertConfig()
    mixtral = family.experts is MIXTRAL_EXPERTS
    shared = values["shared_expert_intermediate_size"] if family.shared_expert else 0
    return ExpertConfig(
        num_experts=values.get("num_experts") or values["num_local_experts"],
        num_active=values["num_experts_per_tok"],
        intermediate_size=values["intermediate_size" if mixtral else "moe_intermediate_size"],
        normalise=mixtral or values["norm_topk_prob"],
        shared_size=shared,
        shared_gate=shared > 0,
        every=1 if mixtral else values["decoder_sparse_step"],
        # Of layers beyond the last, transformers takes no notice.
        dense_layers=()
        if mixtral
        else tuple(n for n in values["mlp_only_layers"] or () if n < values["num_hidden_layers"]),
    )


def _experts_to_json(config: ModelConfig, experts: ExpertConfig, family: Family) -> dict[str, Any]:
    shared: dict[str, Any] = {"num_experts_per_tok": experts.num_active}
    if family.experts is MIXTRAL_EXPERTS:
        return shared | {"num_local_experts": experts.num_experts, "intermediate_size": experts.intermediate_size}
    if family.shared_expert:
        shared["shared_expert_intermediate_size"] = experts.shared_size
    return shared | {
        "num_experts": experts.num_experts,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(config.num_layers) if not experts.is_sparse(layer)],
    }


# ---- generation_config.json


_SAMPLED = ("max_new_tokens", "min_new_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def sampling_in(folder: Path | None) -> dict[str, Any]:
    """The settings of `SamplingParams` that the folder's file names; as there, top_p follows top_k.

    Raises: ConfigError for a file that cannot be read, or words that are no tokens.
    """
    content = {} if folder is None else _read_if_there(folder / GENERATION_CONFIG)
    found = {name: content[name] for name in _SAMPLED if content.get(name) is not None}
    if found.get("top_k") == 0:
        del found["top_k"]
    if {"top_k", "top_p"} <= found.keys():
        found["chained"] = True
    if content.get("do_sample") is False:
        found["temperature"] = 0.0
    if words := content.get("bad_words_ids"):
        if not isinstance(words, list) or not all(isinstance(word, list) for word in words):
            raise ConfigError(f"bad_words_ids in {folder} is {str(words)[:60]}; lists of token ids are expected")
        found["bad_words"] = words
    return found


def end_tokens_in(folder: Path | None) -> tuple[int, ...]:
    """The end tokens in the settings of generation, or else in those of the model."""
    for path in () if folder is None else (folder / GENERATION_CONFIG, folder / CONFIG_FILE):
        named = _read_if_there(path).get("eos_token_id")
        if named is not None:
            ends = tuple(named) if isinstance(named, list) else (named,)
            if not all(isinstance(end, int) and not isinstance(end, bool) for end in ends):
                raise ConfigError(f"{path}: eos_token_id is {named!r}; a token id or a list of them is expected")
            return ends
    return ()


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}

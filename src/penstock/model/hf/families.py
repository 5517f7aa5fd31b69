"""The families of Hugging Face models that the decoder can be, and the names of their parameters in files.

A family is a row of `FAMILIES`; a kind of parameter is a row of a table of names.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.model.hf.files import Names
from penstock.parallel.tensor_slice import Shape, StoredSlice
from penstock.settings import ModelConfig, Scores

_OUTSIDE = {
    "embedding.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.projection.weight": "lm_head.weight",
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


@dataclass(frozen=True)
class ExpertNames:
    """A family's names of the block with a layer's experts, and of each expert's three matrices."""

    block: str
    gate: str
    up: str
    down: str


MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


class Windows(enum.Enum):
    """The layers of a family that use the sliding window, if config.json gives one."""

    NEVER = enum.auto()
    ALL = enum.auto()
    IF_USED = enum.auto()
    """All, if "use_sliding_window" is set."""
    LATER = enum.auto()
    """Those from "max_window_layers" on, if "use_sliding_window" is set."""


@dataclass(frozen=True)
class Family:
    """The switches in which families differ; the lengths are the defaults for a config.json without them."""

    model_type: str
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Windows = Windows.NEVER
    experts: ExpertNames | None = None
    shared_expert: bool = False
    max_length: int = 32768
    window: int | None = None

    def fits(self, config: ModelConfig) -> bool:
        """True if a model of this family can be that decoder."""
        if config.sliding_window is None:
            windows = True
        elif config.num_full_layers:
            windows = self.windows is Windows.LATER
        else:
            windows = self.windows is not Windows.NEVER
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


FAMILIES = {
    "LlamaForCausalLM": Family("llama", max_length=2048),
    "MistralForCausalLM": Family("mistral", windows=Windows.ALL, max_length=131072, window=4096),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, windows=Windows.LATER),
    "Qwen3ForCausalLM": Family("qwen3", qk_norm=True, windows=Windows.LATER),
    "MixtralForCausalLM": Family("mixtral", windows=Windows.ALL, experts=MIXTRAL_EXPERTS, max_length=131072),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe", qkv_bias=True, windows=Windows.LATER, experts=QWEN_EXPERTS, shared_expert=True
    ),
    "Qwen3MoeForCausalLM": Family("qwen3_moe", qk_norm=True, windows=Windows.IF_USED, experts=QWEN_EXPERTS),
}


@dataclass(frozen=True)
class NativeNames(Names):
    """The names of the decoder's parameters in a family's files, and of tensors there that are not parameters."""

    tied: bool
    experts: ExpertNames | None = None

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
        block = f"{layer}.{self.experts.block}"
        if module in _OF_EXPERTS:
            return (StoredSlice.at(f"{block}.{_OF_EXPERTS[module]}.{kind}", shape),)
        return tuple(_stacked(f"{block}.experts", self.experts, module, shape))

    def is_surplus(self, stored: str) -> bool:
        """True for a stored tensor that no parameter needs: a table of frequencies, or a tied head's copy."""
        return stored.endswith("rotary_emb.inv_freq") or (self.tied and stored == "lm_head.weight")


def names_of(config: ModelConfig) -> NativeNames:
    """The names of that decoder's parameters in the files of its family (of any family if none is that decoder)."""
    family = next((family for family in FAMILIES.values() if family.fits(config)), None)
    return NativeNames(config.tie_embeddings, family.experts if family else QWEN_EXPERTS)


def _stacked(experts: str, names: ExpertNames, module: str, shape: Shape) -> Iterator[StoredSlice]:
    """The matrices of all experts [E, O, I]; gate and up share one, in this order."""
    for expert in range(shape[0]):
        if module == "mlp.experts.down":
            yield StoredSlice.at(f"{experts}.{expert}.{names.down}.weight", shape, expert)
        elif module == "mlp.experts.gate_up":
            half = shape[1] // 2
            yield StoredSlice.at(f"{experts}.{expert}.{names.gate}.weight", shape, expert, slice(0, half))
            yield StoredSlice.at(f"{experts}.{expert}.{names.up}.weight", shape, expert, slice(half, 2 * half))

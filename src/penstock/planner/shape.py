"""The shape of a decoder: the numbers that its arithmetic, traffic and memory follow from."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

from penstock.planner.cluster import unknown
from penstock.settings import ExpertConfig, ModelConfig, walk_settings
from penstock.settings.declare import plain

ATTENTION, MLP, EXPERTS, MAMBA = "*", "-", "E", "M"

#: bytes of a parameter's gradient, which is summed in fp32
GRADIENT_BYTES = 4


def value_bytes(dtype: str) -> int:
    """The bytes of an activation, and of a parameter in a product. dtype: "fp64", "fp32", "bf16" or "fp16"."""
    return {"fp64": 8, "fp32": 4}.get(dtype, 2)


# What a shape may have and a run's layers do not, by the field that says so.
_OTHER_LAYERS = {
    "gated": "MLPs of two products",
    "value_size": "latent attention",
    "attention_parameters": "latent attention",
    "latent_size": "latent experts",
    "pattern": "Mamba blocks",
    "mamba_parameters": "Mamba blocks",
    "mamba_size": "Mamba blocks",
}


@dataclass(frozen=True)
class ModelShape:
    """A decoder as a pattern of blocks between an embedding and a head.

    `pattern` has one letter for each block, as in Nemotron-H's files: ``*`` attention, ``-`` an MLP, ``E`` experts,
    ``M`` a Mamba-2 mixer. A layer of Llama is ``*-``.

    >>> ModelShape.of(ModelConfig(num_layers=2, vocab_size=100)).pattern
    '*-*-'
    """

    pattern: str
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    #: width of a head's queries and keys
    head_size: int
    #: width of a head's values; 0 if it is that of its keys
    value_size: int = 0
    intermediate_size: int = 0
    #: True for three products in an MLP (SwiGLU), false for two
    gated: bool = True
    num_experts: int = 0
    num_active: int = 0
    expert_size: int = 0
    #: width that routed experts work in, if they do in less than the hidden size (LatentMoE)
    latent_size: int = 0
    shared_size: int = 0
    #: parameters of an attention block's products, where they do not follow from heads (MLA); 0 if they do
    attention_parameters: int = 0
    #: parameters of a Mamba-2 mixer's products
    mamba_parameters: int = 0
    #: width of what it scans, and of a channel's state
    mamba_size: int = 0
    mamba_state_size: int = 128
    #: tokens that a token attends to; 0 for all before it
    window: int = 0
    tie_embeddings: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> ModelShape:
        """The shape of a model by its settings."""
        experts = config.experts
        kinds = (EXPERTS if config.is_sparse(layer) else MLP for layer in range(config.num_layers))
        return cls(
            "".join(ATTENTION + kind for kind in kinds),
            config.hidden_size,
            config.vocabulary,
            config.num_heads,
            config.key_heads,
            config.head_size,
            intermediate_size=config.intermediate_size,
            num_experts=experts.num_experts,
            num_active=experts.num_active if experts.num_experts else 0,
            expert_size=experts.intermediate_size,
            shared_size=experts.shared_size,
            window=config.sliding_window or 0,
            tie_embeddings=config.tie_embeddings,
        )

    def settings(self) -> dict[str, Any]:
        """The settings of a run, by their dotted names, whose model has this shape.

        Raises: ValueError if a run's layers cannot have it.
        """
        kinds = self.pattern[1::2]
        config = ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=len(kinds) or 1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            intermediate_size=self.intermediate_size or self.expert_size or self.hidden_size,
            sliding_window=self.window or None,
            tie_embeddings=self.tie_embeddings,
            experts=ExpertConfig(
                self.num_experts,
                self.num_active or 1,
                self.expert_size or 1,
                shared_size=self.shared_size,
                dense_layers=tuple(layer for layer, kind in enumerate(kinds) if kind == MLP),
            )
            if EXPERTS in kinds
            else ExpertConfig(),
        )
        found = replace(ModelShape.of(config), intermediate_size=self.intermediate_size)
        if EXPERTS not in kinds:
            found = replace(found, expert_size=self.expert_size)
        wanted = replace(self, value_size=self.value_size if self.value_size != self.head_size else 0)
        unlike = [own.name for own in fields(self) if getattr(found, own.name) != getattr(wanted, own.name)]
        if unlike:
            parts = dict.fromkeys(_OTHER_LAYERS.get(name, name) for name in unlike)
            raise ValueError(f"a run's layers have none of its {' and '.join(parts)}")
        usual = {own.name: own.default for own in walk_settings(ModelConfig())}
        settings = {own.name: plain(own.default) for own in walk_settings(config)}
        return {name: value for name, value in settings.items() if value != plain(usual[name])}

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_size

    @property
    def output_width(self) -> int:
        return self.num_heads * (self.value_size or self.head_size)

    @property
    def kv_width(self) -> int:
        """The width of all keys and values."""
        return self.num_kv_heads * (self.head_size + (self.value_size or self.head_size))

    @property
    def num_products(self) -> int:
        """The number of products in an MLP or an expert."""
        return 3 if self.gated else 2

    def block_parameters(self, kind: str) -> float:
        """The parameters of a block outside its routed experts; norms are left out."""
        hidden = self.hidden_size
        if kind == ATTENTION:
            plain = hidden * (self.query_width + self.kv_width + self.output_width)
            return self.attention_parameters or plain
        if kind == MAMBA:
            return self.mamba_parameters
        if kind == MLP:
            return self.num_products * hidden * self.intermediate_size
        latent = 2 * hidden * self.latent_size
        return self.num_products * hidden * self.shared_size + hidden * self.num_experts + latent

    @property
    def expert_parameters(self) -> float:
        """The parameters of one routed expert."""
        return self.num_products * (self.latent_size or self.hidden_size) * self.expert_size

    @property
    def num_parameters(self) -> float:
        routed = self.pattern.count(EXPERTS) * self.num_experts * self.expert_parameters
        ends = self.vocab_size * self.hidden_size * (1 if self.tie_embeddings else 2)
        return sum(map(self.block_parameters, self.pattern)) + routed + ends

    def stream_bytes(self, num_tokens: float, element_bytes: int) -> float:
        """The bytes that a layer passes to the next for so many tokens."""
        return element_bytes * num_tokens * self.hidden_size

    def cache_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """The bytes of all layers' keys and values that a sequence of so many tokens needs."""
        kept = min(num_tokens, self.window) if self.window else num_tokens
        return element_bytes * kept * self.pattern.count(ATTENTION) * self.kv_width

    def flops_per_token(self, seq_len: int, label_share: float = 1.0) -> float:
        """Operations of forward and backward for a token of a causal sequence, nothing recomputed.

        label_share: of tokens with a label, which alone have logits.
        """
        active = sum(map(self.block_parameters, self.pattern))
        active += self.pattern.count(EXPERTS) * self.num_active * self.expert_parameters
        context = min(seq_len / 2, self.window) if self.window else seq_len / 2
        core = self.pattern.count(ATTENTION) * (self.query_width + self.output_width) * context
        return 6 * (active + label_share * self.hidden_size * self.vocab_size + core)


@cache
def models() -> Mapping[str, ModelShape]:
    """Published models by name."""
    names = {field.name for field in fields(ModelShape)}
    found = {}
    for name, own in _tables().items():
        blocks = "".join(part * number for part, number in own["blocks"])
        values = {key: value for key, value in own.items() if key in names}
        found[name] = ModelShape(pattern=blocks, **{"num_kv_heads": own["num_heads"], **values})
    return found


@cache
def _tables() -> Mapping[str, Any]:
    return tomllib.loads((files("penstock.planner") / "models.toml").read_text(encoding="utf-8"))


def find_model(name: str) -> ModelShape | None:
    """The shape of a published model, however its name is spelt; None if it is not known.

    >>> find_model("LLAMA3.1_405B") == published_model("llama3-405b")
    True
    """
    spelt = {_letters(also): key for key, own in _tables().items() for also in (key, *own.get("also", ()))}
    key = spelt.get(_letters(name.partition("(")[0]))
    return None if key is None else models()[key]


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def published_model(name: str) -> ModelShape:
    """The shape of a published model.

    Raises: ClusterError naming the nearest known one.
    """
    found = find_model(name)
    if found is None:
        raise unknown(name, models(), "model")
    return found

"""The decoder's parameters under the names that they have in Hugging Face's files; a kind of parameter is a row."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.model.hf.load import Piece

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
    """What a family calls its layers' experts, and the three matrices of each."""

    block: str
    gate: str
    up: str
    down: str


MIXTRAL_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
QWEN_EXPERTS = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class NativeNames:
    """Where the decoder's parameters lie in a family's files, and which tensors there are no parameters."""

    tied: bool
    experts: ExpertNames | None = None

    def pieces(self, full_name: str, shape: tuple[int, ...]) -> tuple[Piece, ...]:
        """The stored tensors that make up the parameter of that full name and (whole) shape.

        None for what the files have no place for, since it is heeded in training alone.
        """
        if full_name in _OUTSIDE:
            return (Piece(_OUTSIDE[full_name]),)
        layers, number, rest = full_name.split(".", 2)
        if layers != "layers":
            return ()
        module, _, kind = rest.rpartition(".")
        layer = f"model.layers.{number}"
        if module in _OF_LAYER:
            return (Piece(f"{layer}.{_OF_LAYER[module]}.{kind}"),)
        assert self.experts is not None, full_name
        block = f"{layer}.{self.experts.block}"
        if module in _OF_EXPERTS:
            return (Piece(f"{block}.{_OF_EXPERTS[module]}.{kind}"),)
        return tuple(_stacked(f"{block}.experts", self.experts, module, shape))

    def is_surplus(self, stored: str) -> bool:
        """Whether a stored tensor is rightly left unread: a table of frequencies, or a tied head's copy."""
        return stored.endswith("rotary_emb.inv_freq") or (self.tied and stored == "lm_head.weight")


def _stacked(experts: str, names: ExpertNames, module: str, shape: tuple[int, ...]) -> Iterator[Piece]:
    """The matrices of all experts [E, O, I]; gate and up share one, in this order."""
    for expert in range(shape[0]):
        if module == "mlp.experts.down":
            yield Piece(f"{experts}.{expert}.{names.down}.weight", (expert,))
        elif module == "mlp.experts.gate_up":
            half = shape[1] // 2
            yield Piece(f"{experts}.{expert}.{names.gate}.weight", (expert, slice(0, half)))
            yield Piece(f"{experts}.{expert}.{names.up}.weight", (expert, slice(half, 2 * half)))

"""A model that cannot be cut by its list of layers is refused by name, with what was found in it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForCausalLM,
    BertConfig,
    BertForMaskedLM,
)

from penstock import Engine
from penstock.model.hf.files import WeightFiles
from penstock.model.transformers.model import TransformersModel
from penstock.model.transformers.skeleton import Skeleton, list_of_layers, uses_outside

VOCAB_SIZE, WIDTH, NUM_LAYERS = 11, 4, 3


class Block(nn.Module):
    def forward(self, hidden_states: Tensor, beside: Tensor | None = None) -> Tensor:
        return hidden_states


class Model(nn.Module):
    """Embedding, layers, norm and head, with something that may stand in the way of cutting it."""

    def __init__(self, obstacle: str = "") -> None:
        super().__init__()
        self.obstacle = obstacle
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def forward(self, input_ids: Tensor, use_cache: bool, return_dict: bool) -> SimpleNamespace:
        x = self.embed(input_ids)
        beside = x if self.obstacle == "text" else torch.ones(())
        if self.obstacle == "error":
            raise RuntimeError("needs a picture")
        for layer in self.layers:
            x = layer(x, beside=beside)
            if self.obstacle == "between":
                x = x + self.bias
        return SimpleNamespace(logits=self.head(self.norm(x)))


def skeleton(obstacle: str) -> Skeleton:
    found = Skeleton(Model(obstacle), "layers")
    found.drop_parameters()
    return found


def test_parameters_are_found_on_their_side_of_the_layers() -> None:
    before, after = uses_outside(skeleton(""), VOCAB_SIZE)
    assert before == {"embed.weight"}
    assert after == {"norm.weight", "norm.bias", "head.weight", "head.bias"}


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [
        ("text", "hands its layers an argument that depends on the text"),
        ("between", "changes the hidden states between its layers"),
        ("error", "needs a picture"),
    ],
)
def test_what_stands_in_the_way_is_told(obstacle: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        uses_outside(skeleton(obstacle), VOCAB_SIZE)


def test_a_list_of_as_many_modules_as_there_are_layers_is_found() -> None:
    assert list_of_layers(Model(), NUM_LAYERS) == "layers"
    with pytest.raises(ValueError, match="Model has no list of its 5 layers"):
        list_of_layers(Model(), 5)


def test_a_model_that_reads_both_sides_is_refused(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH, "vocab_size": VOCAB_SIZE}
    BertForMaskedLM(BertConfig(num_hidden_layers=1, **sizes)).save_pretrained(tmp_path)  # pyright: ignore
    with pytest.raises(ValueError, match=r"causal model of .*: BertForMaskedLM is no causal language model"):
        TransformersModel.open(WeightFiles.open(tmp_path))


def test_the_length_after_which_factors_change_is_a_limit() -> None:
    place = {"original_max_position_embeddings": 8}
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], **place}
    text = SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=32, rope_parameters=rope)
    config = SimpleNamespace(get_text_config=lambda: text)
    limits = TransformersModel._limits(SimpleNamespace(config=config))  # pyright: ignore[reportArgumentType]
    assert limits is not None
    assert (limits.vocab_size, limits.max_length, limits.max_generated_length) == (VOCAB_SIZE, 32, 8)


# ---- models of other kinds, in their folders


BART_SIZES: dict[str, Any] = {"vocab_size": 32, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2}
BART_SIZES |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 16)
BART_SIZES |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)


def test_the_decoder_of_such_a_model_alone_is_taken(tmp_path: Path) -> None:
    BartForCausalLM(BartConfig(**BART_SIZES)).save_pretrained(tmp_path)
    Engine.from_hf(tmp_path, native=False, device="cpu").close()

"""Small random-weight models of transformers' families, written as folders."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

VOCAB_SIZE = 97
CLOSE = 1e-5
"""How far fp32 logits of a few units may be from each other when their sums are taken in another order."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@torch.no_grad()
def randomise(module: nn.Module) -> None:
    """Random weights, biases and norms included."""
    generator = torch.Generator().manual_seed(1)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0))


def make_model(model_type: str, **settings: Any) -> PreTrainedModel:
    """A model of that type with random weights, biases and norms included."""
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES | settings))
    randomise(model)
    return model.float().eval()


def make_sequences(lengths: tuple[int, ...]) -> list[Tensor]:
    """Random tokens of these lengths, always the same."""
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCAB_SIZE, (length,), generator=generator) for length in lengths]


def reference_logits(folder: Path, sequences: list[Tensor]) -> Tensor:
    """The logits of each sequence alone, one after the other, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return torch.cat([model(sequence[None]).logits[0] for sequence in sequences])


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors in a folder's files by name."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def make_tokenizer(folder: Path, adds_bos: bool = True, **settings: Any) -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer in a folder; <s> begins every text with `adds_bos`, and </s> ends answers."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat, and what then? the other user said so."] * 4, trainer)
    if adds_bos:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special | settings)
    made.save_pretrained(folder)
    return made

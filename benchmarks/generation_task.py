"""The model of the benchmarks of generation, and its task."""

from dataclasses import dataclass
from functools import partial

import torch

from penstock.engine import Engine, EngineOptions
from penstock.engine.folders.model_folder import EngineArguments
from penstock.engine.generation.decode_cut import cut_to_decode
from penstock.model import ModelGroups, UnitSpec, decoder_units
from penstock.settings import Layout, ModelConfig, Precision, Quantize

_HEAD, _GROUP = 64, 32


@dataclass(frozen=True)
class Generation:
    """The model and its task: by default 8 layers of width 512, 8 prompts of 64 tokens, 64 new tokens each."""

    num_layers: int = 8
    hidden_size: int = 512
    intermediate_size: int = 1408
    vocab_size: int = 4096
    num_kv_heads: int | None = None
    tie_embeddings: bool = False
    num_prompts: int = 8
    prompt_tokens: int = 64
    new_tokens: int = 64
    num_rounds: int = 3
    precision: Precision = Precision.FP32
    quantize: Quantize = Quantize.NONE

    def __post_init__(self) -> None:
        counts = ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_prompts", "prompt_tokens")
        for name in (*counts, "new_tokens", "num_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: at least 1 is possible")
        if self.hidden_size % _HEAD:
            raise ValueError(
                f"hidden_size = {self.hidden_size}: a multiple of {_HEAD}, the width of a head, is possible"
            )
        if self.quantize is Quantize.INT4 and self.intermediate_size % _GROUP:
            raise ValueError(f"intermediate_size = {self.intermediate_size}: int4 takes a multiple of {_GROUP}")
        assert self.config

    @property
    def compute_type(self) -> str:
        """CTranslate2's name for these numbers."""
        if self.quantize is not Quantize.NONE:
            return "int8"
        return {Precision.BF16: "bfloat16"}.get(self.precision, "float32")

    @property
    def described(self) -> str:
        """The model and the task in one line."""
        heads = "" if self.num_kv_heads is None else f", {self.num_kv_heads} key and value heads"
        form = self.precision.value + ("" if self.quantize is Quantize.NONE else f" and {self.quantize.value}")
        return (
            f"{self.num_layers} layers, hidden {self.hidden_size}{heads}, vocabulary {self.vocab_size}, {form}; "
            f"{self.num_prompts} prompts of {self.prompt_tokens} tokens, {self.new_tokens} new ones each"
        )

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.hidden_size // _HEAD,
            num_kv_heads=self.num_kv_heads,
            tie_embeddings=self.tie_embeddings,
            max_length=self.prompt_tokens + self.new_tokens,
        )

    def prompts(self, count: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(self.vocab_size, (count, self.prompt_tokens), generator=generator).tolist()

    def engine(self, layout: Layout) -> Engine:
        options = EngineOptions(
            device="cpu",
            measure_lengths=(self.prompt_tokens,),
            precision=self.precision,
            quantize=self.quantize,
            learns=False,
            read_only=True,
        )
        units = partial(_units, self.config)
        given = EngineArguments(units, self.hidden_size, layout, options, None)
        rows, tokens = -(-self.num_prompts // layout.pp), self.prompt_tokens + self.new_tokens / 2
        return Engine(*cut_to_decode(given, rows, tokens))


def _units(config: ModelConfig, groups: ModelGroups) -> tuple[UnitSpec, ...]:
    return decoder_units(config, groups=groups)

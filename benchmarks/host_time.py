"""The host's time of a training step and of a decoded token, over that of a plain torch loop with equal work.

At these sizes computing takes next to nothing, so that what is measured is the time of Python and of torch's calls: on
a device, what bounds small models. Both sides run in one process on one thread and take turns. A step has the gradient
of several microbatches, clipping and a fused AdamW; the plain loops are those that a reader of torch's pages writes.
The products are torch's on both sides.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.common import main, new_parser, options_of, spread
from penstock.cli.options import Parser
from penstock.data import MicroBatchSpec, PackedBatch
from penstock.engine import Engine, EngineOptions
from penstock.model import decoder_units
from penstock.model.linear import TORCH
from penstock.settings import Layout, ModelConfig, OptimizerConfig, SamplingParams

Job = Callable[[], object]

_VOCABULARY = 64
_HEADS = 2


@dataclass(frozen=True)
class Small:
    """A model whose compute is negligible, and its batch."""

    width: int
    layers: int
    microbatches: int
    length: int
    tokens: int

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=_VOCABULARY,
            hidden_size=self.width,
            intermediate_size=2 * self.width,
            num_layers=self.layers,
            num_heads=_HEADS,
            max_length=self.length + self.tokens,
        )

    def documents(self) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(_VOCABULARY, (self.microbatches, self.length), generator=generator)


class Block(nn.Module):
    """A layer of one's own: norm, two products and a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Attention with rotary positions, with an own cache of keys and values where one is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor], cache: list[Tensor] | None = None) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            layer(y).view(len(x), _HEADS, -1).transpose(0, 1) for layer in (self.query, self.key, self.value)
        )
        query, key = _rotated(query, *turn), _rotated(key, *turn)
        if cache is not None:
            cache[:] = torch.cat((cache[0], key), 1), torch.cat((cache[1], value), 1)
            key, value = cache
        seen = F.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=cache is None)[0]
        return x + self.output(seen.transpose(0, 1).reshape(len(x), -1))


class Mlp(nn.Module):
    """A gated MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A decoder as a reader of torch's pages writes it."""

    def __init__(self, small: Small) -> None:
        super().__init__()
        width = small.width
        self.embedding = nn.Embedding(_VOCABULARY, width)
        self.attention = nn.ModuleList(Attention(width) for _ in range(small.layers))
        self.mlp = nn.ModuleList(Mlp(width) for _ in range(small.layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, _VOCABULARY, bias=False)
        frequencies = 10_000.0 ** (-torch.arange(0, width // _HEADS, 2) / (width // _HEADS))
        angles = torch.outer(torch.arange(small.length + small.tokens), frequencies).repeat(1, 2)
        self.cosines, self.sines = angles.cos(), angles.sin()

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None, begin: int = 0) -> Tensor:
        x = self.embedding(tokens)
        turn = (self.cosines.narrow(0, begin, len(tokens)), self.sines.narrow(0, begin, len(tokens)))
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = mlp(attention(x, turn, None if caches is None else caches[number]))
        return self.head(self.norm(x))


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def _step_of_engine(engine: Engine, small: Small) -> Job:
    batch = PackedBatch.from_documents(list(small.documents()))
    return partial(engine.train_batch, batch, micro_batches=MicroBatchSpec(num=small.microbatches))


def _step_of_loop(model: nn.Module, small: Small) -> Job:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    documents = small.documents()
    num_labels = small.microbatches * (small.length - 1)

    def step() -> float:
        losses = []
        for tokens in documents:
            loss = F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum") / num_labels
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(norm + sum(losses))

    return step


def _token_of_loop(model: Decoder, small: Small) -> Job:
    prompt = small.documents()[0]

    @torch.inference_mode()
    def answer() -> list[int]:
        caches = [[torch.empty(_HEADS, 0, small.width // _HEADS)] * 2 for _ in model.attention]
        tokens = [int(_prompt(model, prompt, caches).argmax())]
        for place in range(len(prompt), len(prompt) + small.tokens - 1):
            tokens.append(int(model(torch.tensor(tokens[-1:]), caches, place)[-1].argmax()))
        return tokens

    return answer


def _prompt(model: Decoder, prompt: Tensor, caches: list[list[Tensor]]) -> Tensor:
    """The logits after the prompt, token by token, as everything is computed with this cache."""
    logits = torch.empty(0)
    for place in range(len(prompt)):
        logits = model(prompt[place : place + 1], caches, place)[-1]
    return logits


def _token_of_engine(engine: Engine, small: Small) -> Job:
    prompt = small.documents()[0].tolist()
    return partial(engine.generate, [prompt], SamplingParams(max_new_tokens=small.tokens, temperature=0.0))


def jobs(small: Small) -> dict[str, tuple[Job, Job]]:
    """By name the engine's job, and the plain loop's of equal work."""
    options = EngineOptions("1f1b", optimizer=OptimizerConfig.of("adamw"), device="cpu")
    layers = [
        nn.Embedding(_VOCABULARY, small.width),
        *(Block(small.width) for _ in range(small.layers)),
        nn.Linear(small.width, _VOCABULARY),
    ]
    own = Engine.from_layers(layers, small.width, options=options)
    native = Engine(decoder_units(small.config(), TORCH), small.width, Layout(), options)
    plain = Decoder(small)
    return {
        "step_of_own_blocks": (_step_of_engine(own, small), _step_of_loop(nn.Sequential(*layers), small)),
        "step_of_decoder": (_step_of_engine(native, small), _step_of_loop(plain, small)),
        "token": (_token_of_engine(native, small), _token_of_loop(plain, small)),
    }


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Time both sides of each job in turns; ratios of processor times of one round, and milliseconds."""
    torch.set_num_threads(1)
    small = options_of(Small, given)
    found = {}
    for name, sides in jobs(small).items():
        gc.collect()
        gc.freeze()
        for job in sides:
            job()
        rounds = [[_seconds(job) for job in sides] for _ in range(given.rounds)]
        found[name] = {
            "ratio": spread([engine / plain for engine, plain in rounds]),
            "engine_ms": spread([1e3 * engine for engine, _ in rounds]),
            "plain_ms": spread([1e3 * plain for _, plain in rounds]),
        }
    return found


def _seconds(job: Job) -> float:
    start = time.process_time()
    job()
    return time.process_time() - start


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("host_time", __doc__, "--layers 32 --rounds 30")
    parser.add_argument("--width", type=int, default=32, help="the model's width")
    parser.add_argument("--layers", type=int, default=16, help="blocks of the model")
    parser.add_argument("--microbatches", type=int, default=8, help="microbatches of a step")
    parser.add_argument("--length", type=int, default=16, help="tokens of a microbatch, and of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="tokens that an answer has")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each side")
    return parser


if __name__ == "__main__":
    sys.exit(main("host_time"))

"""Tokens per second of generation, and how busy its stages are.

Three parts, each of whose sides take turns in one run: two threads, as they are used by Penstock in several layouts and
by other libraries with a model of the same shape; rows that are refilled at once and rows that are not; and stages that
sleep in place of computing, whose time shows what the ring costs. `generate_gpu` is the part for a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.common import main, new_parser, options_of, progress, spread
from benchmarks.ranks import Turn, in_turns
from penstock.cli.doctor import processor_name
from penstock.cli.options import Parser
from penstock.engine import Engine, EngineOptions
from penstock.engine.generation.decode_cut import cut_to_decode
from penstock.engine.generation.options import GenerateOptions
from penstock.engine.options import EngineArguments
from penstock.engine.precision import parameter_dtype
from penstock.model import CachedRows, CacheSize, ModelGroups, UnitSpec, decoder_units
from penstock.schedule import Batch, Scheduler, Sequence, Token
from penstock.settings import Layout, ModelConfig, Precision, Quantize, SamplingParams

_HEAD, _GROUP = 64, 32


@dataclass(frozen=True)
class Generation:
    """The model and its task."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_kv_heads: int | None
    num_prompts: int
    prompt_tokens: int
    new_tokens: int
    precision: Precision
    quantize: Quantize
    tie_embeddings: bool = False

    @classmethod
    def of(cls, *words: str) -> Generation:
        """The generation that these options ask for."""
        return options_of(cls, parser().parse_args(words))

    def __post_init__(self) -> None:
        counts = ("num_layers", "hidden_size", "intermediate_size", "vocab_size", "num_prompts", "prompt_tokens")
        for name in (*counts, "new_tokens"):
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


# ---- other libraries: models of the same shape, which answer the same prompts


def llama(generation: Generation, device: str = "cpu") -> Any:
    """A model of transformers of the shape, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    ours = generation.config
    config = LlamaConfig(
        vocab_size=ours.vocabulary,
        hidden_size=ours.hidden_size,
        intermediate_size=ours.intermediate_size,
        num_hidden_layers=ours.num_layers,
        num_attention_heads=ours.num_heads,
        num_key_value_heads=ours.key_heads,
        max_position_embeddings=ours.max_length,
        tie_word_embeddings=ours.tie_embeddings,
    )
    with torch.device(device):
        return LlamaForCausalLM(config)


def transformers_sides(
    generation: Generation, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[], None]]:
    """Greedy `transformers.generate` of the same prompts with a model of the same shape, by kind of cache."""
    model = llama(generation, device).to(dtype).eval()
    given = torch.tensor(generation.prompts(generation.num_prompts), device=device)

    @torch.inference_mode()
    def generate(cache: str | None) -> None:
        made = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=generation.new_tokens,
            min_new_tokens=generation.new_tokens,
            do_sample=False,
            pad_token_id=0,
            cache_implementation=cache,
        )
        assert made.shape[1] == generation.prompt_tokens + generation.new_tokens

    return {"growing cache": partial(generate, None), "static cache": partial(generate, "static")}


def check_ctranslate2(compute_type: str) -> None:
    """Refuse a comparison that cannot be made here.

    Raises:
        ValueError: CTranslate2 is missing, or does not compute with these numbers on this processor.
    """
    if find_spec("ctranslate2") is None:
        raise ValueError("--against ctranslate2 needs it; install it with pip install 'penstock[bench]'")
    import ctranslate2  # pyright: ignore[reportMissingImports]

    possible = sorted(ctranslate2.get_supported_compute_types("cpu"))
    if compute_type not in possible:
        raise ValueError(
            f"--against ctranslate2: on this processor it does not compute in {compute_type}; possible are "
            f"{', '.join(possible)}, so --precision fp32 or --quantize int8, or the comparison with transformers alone"
        )


def ctranslate2_sides(generation: Generation, compute_type: str) -> dict[str, Callable[[], None]]:
    """Greedy generation by CTranslate2 of a model converted on the spot, by how it uses two cores.

    compute_type: one of CTranslate2's, such as int8. Raises: ImportError where it is not installed.
    """
    import ctranslate2  # pyright: ignore[reportMissingImports]
    from ctranslate2.converters import TransformersConverter  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        given, converted = Path(folder) / "given", Path(folder) / "converted"
        llama(generation).save_pretrained(given)
        _words(generation.vocab_size).save_pretrained(given)
        TransformersConverter(str(given)).convert(str(converted), quantization=compute_type)
        forms = {"two threads": (1, 2), "two workers": (2, 1)}
        generators = {
            name: ctranslate2.Generator(
                *(str(converted), "cpu"), compute_type=compute_type, inter_threads=workers, intra_threads=threads
            )
            for name, (workers, threads) in forms.items()
        }
    prompts = [[f"t{token}" for token in prompt] for prompt in generation.prompts(generation.num_prompts)]

    def generate(name: str) -> None:
        made = generators[name].generate_batch(
            prompts,
            max_batch_size=-(-len(prompts) // forms[name][0]),
            max_length=generation.new_tokens,
            min_length=generation.new_tokens,
            sampling_topk=1,
            include_prompt_in_result=False,
        )
        assert all(len(answer.sequences_ids[0]) == generation.new_tokens for answer in made)

    return {name: partial(generate, name) for name in forms}


def _words(count: int) -> Any:
    """A tokenizer with a word for each id, which the conversion asks for."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"t{number}": number for number in range(count)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0", bos_token="t1", eos_token="t2")


# ---- two threads

NUM_RANKS = 2
TRANSFORMERS, CTRANSLATE2, PENSTOCK = "transformers", "ctranslate2", "penstock"
PEERS = (TRANSFORMERS, CTRANSLATE2)


LAYOUTS = {
    "two threads": Layout(ranks=(0,)),
    "two stages": Layout(pp=NUM_RANKS),
    "two copies": Layout(dp=NUM_RANKS),
}


def _penstock(generation: Generation, rank: int) -> Turn:
    greedy, turns = SamplingParams(max_new_tokens=generation.new_tokens, temperature=0), {}
    for name, layout in LAYOUTS.items():
        prompts = generation.prompts(generation.num_prompts)
        turns[name] = generation.engine(layout), prompts[rank :: layout.dp] if layout.dp > 1 else prompts

    def turn() -> dict[str, float]:
        found = {}
        for name, (engine, prompts) in turns.items():
            dist.barrier()
            torch.set_num_threads(NUM_RANKS // LAYOUTS[name].world_size)
            start = time.perf_counter()
            if engine.is_here:
                engine.generate(prompts, greedy)
            dist.barrier()
            found[name] = time.perf_counter() - start
            torch.set_num_threads(1)
        return found

    return turn


def _peer(peer: str, generation: Generation, rank: int) -> Turn:
    """Run another library on the first rank, with two threads, in each of its forms; the second rank waits."""
    if rank > 0:
        return dict
    if peer == TRANSFORMERS:
        sides = transformers_sides(generation, dtype=parameter_dtype(generation.precision))
    else:
        sides = ctranslate2_sides(generation, generation.compute_type)

    def turn() -> dict[str, float]:
        torch.set_num_threads(2)
        found = {}
        for name, generate in sides.items():
            start = time.perf_counter()
            generate()
            found[name] = time.perf_counter() - start
        torch.set_num_threads(1)
        return found

    return turn


def _prepare(side: str, rank: int, generation: Generation) -> Turn:
    return _penstock(generation, rank) if side == PENSTOCK else _peer(side, generation, rank)


def _against(generation: Generation, peers: list[str], num_rounds: int) -> dict[str, Any]:
    """Compare tokens per second of all sides, in turn in one run; a ratio is over the better of a peer's forms."""
    sides = in_turns((*peers, PENSTOCK), NUM_RANKS, _prepare, generation, num_rounds=num_rounds)
    num_tokens = generation.num_prompts * generation.new_tokens
    rates: dict[str, list[float]] = {}
    for side, ranks in sides.items():
        for found in ranks[0]:
            for name, wall_s in found.items():
                rates.setdefault(f"{side}, {name}", []).append(num_tokens / wall_s)
    median = {name: statistics.median(found) for name, found in rates.items()}

    def best(side: str) -> float:
        return max(rate for name, rate in median.items() if name.startswith(f"{side}, "))

    ratios = {f"over_{peer}": best(PENSTOCK) / best(peer) for peer in peers}
    per_s = {name: spread(found) for name, found in rates.items()}
    return {"processor": processor_name(), "tokens_per_s": per_s} | ratios


# ---- refilling

REFILLED, NOT_REFILLED = "refilled", "not refilled"
REFILLS = {
    REFILLED: {},
    "refilled, in the order given": {"longest_first": False},
    NOT_REFILLED: {"refill": False, "longest_first": False},
}
"""Settings that make the same answers; without refilling, sequences are taken in the order given."""
PROMPTS = "prompts alone"


@dataclass(frozen=True)
class Refills:
    """Many prompts for few rows; answer lengths are log-uniform, from an eighth of `new_tokens` to all."""

    generation: Generation
    num_prompts: int = 64
    rows_per_slot: int = 8

    @property
    def lengths(self) -> list[int]:
        draw, longest = random.Random(0), self.generation.new_tokens
        return [round(longest * 8 ** -draw.random()) for _ in range(self.num_prompts)]

    def options(self, name: str) -> GenerateOptions:
        prefill_tokens = self.rows_per_slot // 2 * self.generation.prompt_tokens
        return GenerateOptions(rows_per_slot=self.rows_per_slot, prefill_tokens=prefill_tokens, **REFILLS[name])

    def num_batches(self, name: str) -> int:
        """Batches that every stage computes."""
        options, num_batches = self.options(name), 0
        prompt = range(self.generation.prompt_tokens)
        sequences = [Sequence(i, i, 0, prompt, SamplingParams(length)) for i, length in enumerate(self.lengths)]
        shape = options.shape(len(sequences), NUM_RANKS)
        scheduler = Scheduler(sequences, shape, options.refill, options.longest_first)
        in_flight: dict[int, Batch] = {}
        while (slot := scheduler.next_slot()) is not None:
            if slot in in_flight:
                last = in_flight.pop(slot)
                scheduler.update(last, [Token(0)] * len(last.sampled))
            batch = scheduler.schedule()
            assert batch is not None
            if batch.items:
                in_flight[slot] = batch
                num_batches += 1
        return num_batches


def _prepare_refill(side: str, rank: int, refills: Refills) -> Turn:
    engine = refills.generation.engine(Layout(pp=NUM_RANKS))
    prompts = refills.generation.prompts(refills.num_prompts)
    params = [SamplingParams(max_new_tokens=length, seed=i) for i, length in enumerate(refills.lengths)]

    def turn() -> dict[str, float]:
        found = {}
        for name in REFILLS:
            dist.barrier()
            found[name] = engine.generate(prompts, params, refills.options(name)).wall_s
        dist.barrier()
        one = SamplingParams(max_new_tokens=1)
        found[PROMPTS] = engine.generate(prompts, one, refills.options(REFILLED)).wall_s
        return found

    return turn


def _refilling(generation: Generation, num_rounds: int) -> dict[str, Any]:
    """Compare rows refilled at once with rows refilled when all of a slot are free, on the same engine.

    `ideal` is the gain if no row were ever free and a batch took equally long for any number of rows. Prompts take
    equally long in either way; `without_prompts` is the ratio of what remains.
    """
    refills = Refills(generation)
    found = in_turns((PENSTOCK,), NUM_RANKS, _prepare_refill, refills, num_rounds=num_rounds)
    num_tokens, visits = sum(refills.lengths), {name: refills.num_batches(name) for name in REFILLS}
    rates = {name: [num_tokens / turn[name] for turn in found[PENSTOCK][0]] for name in REFILLS}
    median = {name: statistics.median(rate) for name, rate in rates.items()}
    prompts_s = statistics.median(turn[PROMPTS] for turn in found[PENSTOCK][0])
    refilled_s, other_s = (num_tokens / median[name] - prompts_s for name in (REFILLED, NOT_REFILLED))
    return {
        "tokens_per_s": {name: spread(rate) for name, rate in rates.items()},
        "visits": visits,
        "prompts_s": prompts_s,
        "over_not_refilled": {name: rate / median[NOT_REFILLED] for name, rate in median.items()},
        "without_prompts": other_s / refilled_s,
        "ideal_over_not_refilled": visits[NOT_REFILLED] * refills.rows_per_slot / num_tokens,
    }


# ---- emulated stages


class SleepingUnit(nn.Module):
    """Reads tokens or passes its input on, and sleeps for its time; the last one returns logits."""

    def __init__(self, place: int, num_units: int, forward_s: float, size: int) -> None:
        super().__init__()
        self.first, self.last = place == 0, place == num_units - 1
        self.forward_s, self.size = forward_s, size
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, sequences: object) -> Tensor:
        time.sleep(self.forward_s)
        return x.new_zeros(len(x), self.size, dtype=torch.float32) if self.first else x

    def new_cache(self, size: CacheSize) -> None:
        return None

    def decode(self, x: Tensor, cache: None, rows: CachedRows) -> Tensor:
        y = self(x, rows)
        return y[rows.sampled_S] if self.last else y


@dataclass(frozen=True)
class EmulatedRing:
    """Stages that sleep for `forward_s` per batch, and the number of slots that go round them."""

    num_ranks: int = 4
    num_slots: int = 8
    forward_s: float = 0.020
    new_tokens: int = 24

    def units(self) -> tuple[UnitSpec, ...]:
        count = self.num_ranks
        return tuple(
            UnitSpec(
                f"sleep.{i}",
                partial(SleepingUnit, i, count, self.forward_s, 128),
                lambda module, seed: module.to_empty(device="cpu") and None,
                1,
                1.0,
            )
            for i in range(count)
        )


def _prepare_emulated(side: str, rank: int, ring: EmulatedRing) -> Turn:
    engine = Engine(ring.units(), 128, Layout(pp=ring.num_ranks), EngineOptions(device="cpu"))
    prompts = [[i + 1] for i in range(ring.num_slots)]
    params = SamplingParams(max_new_tokens=ring.new_tokens)
    options = GenerateOptions(num_slots=ring.num_slots, rows_per_slot=1)

    def turn() -> float:
        dist.barrier()
        engine.generate(prompts, params, options)
        # The ring is full when a stage's first batch arrives, since all slots start in the first round.
        records = engine.recorder.records()
        return sum(one.end_ns - one.start_ns for one in records) / (records[-1].end_ns - records[0].start_ns)

    return turn


def _emulated(ring: EmulatedRing, num_rounds: int) -> dict[str, Any]:
    """Measure the share of time that each stage computes, from its first batch to its last."""
    found = in_turns((PENSTOCK,), ring.num_ranks, _prepare_emulated, ring, num_rounds=num_rounds)
    shares = [statistics.median(rounds) for rounds in found[PENSTOCK]]
    return {"ranks": ring.num_ranks, "slots": ring.num_slots, "busy_shares": shares, "least_busy_share": min(shares)}


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Run the parts that are asked for."""
    if given.rounds < 1:
        raise ValueError(f"--rounds {given.rounds}: at least 1 is possible")
    generation, rounds = options_of(Generation, given), given.rounds
    if CTRANSLATE2 in given.against:
        check_ctranslate2(generation.compute_type)
    progress(generation.described)
    found = {}
    if "peers" in given.parts:
        found[f"against {' and '.join(given.against)}"] = _against(generation, given.against, rounds)
    if "refill" in given.parts:
        found["refilling"] = _refilling(replace(generation, prompt_tokens=16), rounds)
    if "emulated" in given.parts:
        found["emulated stages"] = _emulated(EmulatedRing(), rounds)
    return found


def parser() -> Parser:
    """The options of this benchmark."""
    parser = new_parser("generate", __doc__, "--parts peers --precision bf16", "--against ctranslate2 --quantize int8")
    parts = ["peers", "refill", "emulated"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, metavar="PART", help=", ".join(parts))
    parser.add_argument(
        "--against", nargs="+", choices=PEERS, default=[TRANSFORMERS], metavar="PEER", help=" or ".join(PEERS)
    )
    precisions = [Precision.FP32, Precision.BF16]
    parser.add_argument(
        "--precision", choices=precisions, type=Precision, default=Precision.FP32, help="of weights and activations"
    )
    parser.add_argument(
        "--quantize",
        choices=[*Quantize],
        type=Quantize,
        default=Quantize.NONE,
        help="Penstock's weights; CTranslate2 then has int8",
    )
    sizes = parser.add_argument_group("the model and its task")
    sizes.add_argument("--layers", type=int, default=8, dest="num_layers", help="layers of the model")
    sizes.add_argument("--hidden-size", type=int, default=512, help="width of the model")
    sizes.add_argument("--intermediate-size", type=int, default=1408, help="width of its MLPs")
    sizes.add_argument("--kv-heads", type=int, dest="num_kv_heads", help="heads of keys and values, if fewer")
    sizes.add_argument("--vocab-size", type=int, default=4096, help="tokens of its vocabulary")
    sizes.add_argument("--prompts", type=int, default=8, dest="num_prompts", help="number of prompts")
    sizes.add_argument("--prompt-tokens", type=int, default=64, help="tokens of a prompt")
    sizes.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=3, help="of each side, in turn")
    return parser


if __name__ == "__main__":
    sys.exit(main("generate"))

"""The settings of a run: frozen sections, as they stand in the TOML file and on the command line.

Nothing heavy is imported here: a mistake in a file is told before PyTorch is loaded. Reading stands in
`config_file`, what can not go together in `config_check`.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.engine.schedules import ScheduleChoice

RopeScalingName = Literal["none", "linear", "llama3", "yarn"]
Precision = Literal["fp32", "bf16", "bf16-autocast", "fp16"]
Recompute = Literal["none", "full"] | tuple[int, ...]
Normalization = Literal["global", "dp", "token_per_microbatch", "microbatch_mean"]
Decay = Literal["constant", "linear", "cosine", "inverse-sqrt"]
Packing = Literal["window", "document"]
Device = Literal["auto", "cpu", "cuda"]
Scores = Literal["softmax", "sigmoid"]
GroupScore = Literal["best", "best-two"]
Attention = Literal["ring", "all-to-all"]
SearchedPlacement = Literal["loop", "v"]


@dataclass(frozen=True)
class ModelSection:
    """The decoder: Llama, Qwen2, Qwen3 and Mistral are settings of one."""

    pretrained: str | None = None
    """A Hugging Face folder, or that of a run, whose weights training starts from; it decides all that follows here."""
    vocab_size: int | None = None
    """Tokens the model knows; left out, as many as the tokenizer has."""
    hidden_size: int = 128
    """Width of the residual stream."""
    intermediate_size: int = 344
    """Width inside an MLP."""
    num_layers: int = 4
    """Decoder layers; each is two units, an attention half and an MLP half."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int | None = None
    """Key and value heads, a divisor of num_heads; left out, as many as query heads."""
    head_dim: int | None = None
    """Width of a head; left out, hidden_size / num_heads."""
    max_length: int = 2048
    """The longest sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary positions."""
    norm_eps: float = 1e-5
    """Added to the mean square in every norm."""
    qkv_bias: bool = False
    """Bias on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMSNorm on queries and keys (Qwen3)."""
    tie_embeddings: bool = False
    """The head uses the embedding's weight."""
    sliding_window: int | None = None
    """Tokens that attention sees, the token itself included (Mistral); left out, all before it."""
    num_predictions: int = 0
    """Tokens beyond the next that are predicted too while the model learns, each through a further layer."""
    prediction_loss: float = 0.3
    """What the mean of their losses is weighted with."""
    num_full_layers: int = 0
    """The first so many layers see all tokens in spite of that (Qwen2)."""


@dataclass(frozen=True)
class RopeSection:
    """How rotary positions are stretched over longer texts than those a model was first trained on."""

    scaling: RopeScalingName = "none"
    """The way: all frequencies alike, as Llama 3 does, or YaRN."""
    factor: float = 1.0
    """By how much, at most."""
    original_length: int | None = None
    """The longest sequence before stretching (llama3, yarn)."""
    low: float = 1.0
    """Frequencies of fewer turns over that length are stretched in full (llama3, yarn)."""
    high: float | None = None
    """Those of more turns not at all; left out, 4 (llama3) or 32 (yarn)."""
    attention_factor: float | None = None
    """What tables are multiplied by (yarn); left out, 0.1 log(factor) + 1."""
    truncate: bool = True
    """The ends of the ramp between low and high are rounded to whole pairs (yarn)."""


@dataclass(frozen=True)
class ExpertsSection:
    """What layers have instead of one MLP: Mixtral's, Qwen's and DeepSeek's experts are settings of one."""

    num_experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    num_active: int = 2
    """Experts that a token goes to."""
    intermediate_size: int = 128
    """Width inside an expert."""
    scores: Scores = "softmax"
    """What becomes of the router's logits; "sigmoid" scores each expert by itself (DeepSeek-V3)."""
    normalise: bool = True
    """A token's weights are divided by their sum."""
    scaling_factor: float = 1.0
    """What weights are multiplied by at last."""
    num_groups: int = 1
    """Equal groups of neighbouring experts; a token keeps to num_active_groups of them."""
    num_active_groups: int = 1
    """Those groups."""
    group_score: GroupScore = "best"
    """What decides between groups: the best score (DeepSeek-V2), or the sum of the best two (DeepSeek-V3)."""
    bias_step: float = 0.0
    """By how much the bias of an expert moves after every step, towards balance and beside the loss; 0 for no bias."""
    microbatch_loss: float = 0.0
    """Coefficient of the balance of a microbatch's tokens."""
    sequence_loss: float = 0.0
    """Coefficient of the balance within each sequence."""
    global_loss: float = 0.0
    """Coefficient of the balance over all tokens of a step."""
    z_loss: float = 0.0
    """Coefficient of the mean square of the logits' log-sum-exp."""
    shared_size: int = 0
    """Width inside the shared expert, which every token goes to; 0 for none."""
    shared_gate: bool = False
    """The shared expert's output is scaled by a sigmoid of its own (Qwen2-MoE)."""
    num_dense_first: int = 0
    """Layers at the start that have one MLP."""
    every: int = 1
    """Of the layers after them only each n-th has experts."""
    dense_layers: tuple[int, ...] = ()
    """Further layers, by number, that have one MLP."""


@dataclass(frozen=True)
class DataSection:
    """What is learned from."""

    corpus: str = "stdlib"
    """"stdlib" (the source of Python's standard library), or a file, a folder, a pattern: text, JSONL or Parquet."""
    validation_corpus: str | None = None
    """Where validation reads; left out, a part of the corpus's own documents is held back."""
    validation_fraction: float = 0.1
    """That part; 0 for no validation."""
    tokenizer: str = "bytes"
    """"bytes", or a Hugging Face tokenizer.json, or a folder that holds one."""
    end_token: str | None = None
    """The token put after every document, by its text (for bytes any text will do); left out, none."""
    text_field: str = "text"
    """The column or key that holds the text in JSONL and Parquet."""
    packing: Packing = "window"
    """Items of a batch: windows of equal length over all documents, or a document each."""
    cross_documents: bool = False
    """Attention reaches over documents that share a window."""
    sequence_length: int = 256
    """Tokens of one window, and the most of one document."""
    num_sequences: int = 8
    """Items of one step, over all data-parallel ranks."""
    cache: str | None = "~/.cache/penstock"
    """Where tokenised text is kept for other ranks and runs; None keeps it in memory."""


@dataclass(frozen=True)
class ParallelSection:
    """The grid of processes."""

    pp: int = 1
    """Pipeline ranks."""
    dp: int = 1
    """Data-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks, which share every sequence's tokens."""
    tp: int = 1
    """Tensor-parallel ranks, which share every layer."""
    ep: int = 1
    """Ranks that share every layer's experts; they are among those of dp and cp, so it divides dp * cp."""
    order: str = "dp-pp-cp-tp"
    """How ranks are numbered along these axes, the last one fastest: ranks of one machine have adjacent numbers."""
    attention: Attention = "ring"
    """How cp ranks see each other's tokens: keys and values go round a "ring", or heads are exchanged "all-to-all"."""
    device: Device = "auto"
    """"auto" takes GPUs when every local rank finds one."""
    num_threads: int = 1
    """CPU threads of a rank."""
    timeout_s: float = 600.0
    """For how long a rank waits for a peer before it says so and ends."""
    elastic: bool = False
    """Run on as many pipelines as the group of processes has room for, whatever dp is."""

    @property
    def axes(self) -> tuple[str, ...]:
        """The order's axes, slowest first."""
        return tuple(self.order.split("-"))

    @property
    def sizes(self) -> dict[str, int]:
        """The axes' sizes by name; their product is the number of processes."""
        return {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}


@dataclass(frozen=True)
class ScheduleSection:
    """Who does what when."""

    name: str = "1f1b"
    """One of `penstock schedule list`, or a file: .csv as torch writes it, or .txt as `penstock schedule export`."""
    stages_per_rank: int | None = None
    """Stages that each pipeline rank holds; left out, as many as the schedule is meant for."""
    receives_ahead: int = 2
    """Receives posted ahead of need, an edge."""
    group_size: int | None = None
    """Microbatches that take turns at a rank's stages in interleaved schedules; left out, as many as ranks."""
    max_live_microbatches: float | None = None
    """What the search `auto` may keep alive on a rank; left out, as many as ranks."""
    placement: SearchedPlacement | None = None
    """How `auto` deals stages to ranks: round and round, or there and back ("v"); left out, round and round."""
    overlap: bool = True
    """In fused pairs, one half computes while the other's collectives travel; false: one half after the other."""
    early_release: bool = False
    """In overlapped pairs, a layer's backward ends, and lets go of it, before the forward's experts compute."""
    split_backward: bool = False
    """In combined schedules, pairs hold the backward of the inputs, and that of the weights comes behind them."""
    early_gradients: bool = True
    """Gradients leave for the rank before as soon as they are there, before those of the weights are computed."""
    cut: tuple[int, ...] | None = None
    """Units of each stage, by hand; left out, the cut that makes the slowest rank fastest."""
    measure: bool = False
    """Measure the units' times before that cut, instead of estimating them; `auto` searches an order for them."""

    search_cut: bool = False
    """Search for that cut together with the order of `auto`, for the shortest step by the times measured."""

    @property
    def choice(self) -> ScheduleChoice:
        """The schedule as the engine takes it."""
        return ScheduleChoice(
            self.name,
            self.stages_per_rank,
            self.receives_ahead,
            self.group_size,
            self.max_live_microbatches,
            self.split_backward,
            self.early_gradients,
            self.placement,
            self.search_cut,
        )


@dataclass(frozen=True)
class OptimizerSection:
    """AdamW and its schedules."""

    learning_rate: float = 1e-3
    """The highest learning rate."""
    decay: Decay = "cosine"
    """How the learning rate falls after the warm-up."""
    num_warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""
    num_decay_steps: int | None = None
    """The step at which the fall ends; left out, the last step of the run."""
    final_learning_rate: float = 0.0
    """Where the fall ends."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the latter."""
    weight_decay: float = 0.1
    """Weight decay; norms and biases have none."""
    final_weight_decay: float | None = None
    """Where weight decay ends, by cosine over the run; left out, it is constant."""
    clip_norm: float = 1.0
    """Gradients are scaled down to this global norm; 0 leaves them alone."""
    zero: bool = False
    """Data- and context-parallel ranks share out the optimizer's state and fp32 masters (ZeRO-1)."""


@dataclass(frozen=True)
class TrainSection:
    """The loop."""

    steps: int = 100
    """Optimizer steps."""
    seed: int = 0
    """Decides the initial weights and the order of the data."""
    precision: Precision = "fp32"
    """Parameters in fp32 or 16 bit (with fp32 masters), or fp32 with autocast."""
    recompute: Recompute = "none"
    """Layers whose activations are computed again in backward: "none", "full", or their numbers."""
    normalize: Normalization = "global"
    """What the loss is divided by."""
    num_microbatches: int = 8
    """Parts of a data-parallel rank's batch, at least."""
    max_microbatch_tokens: int | None = None
    """A budget of tokens for each part; left out, there is none."""


@dataclass(frozen=True)
class CheckpointSection:
    """What survives."""

    every: int = 100
    """Steps between checkpoints; 0 saves at the end alone."""
    keep: int = 3
    """The newest so many are kept."""
    in_background: bool = True
    """Write while training goes on."""


@dataclass(frozen=True)
class ValidationSection:
    """Loss on text that is not trained on."""

    every: int = 100
    """Steps between validations; 0 validates at the end alone."""
    num_sequences: int = 64
    """Sequences of one validation, always the same."""


@dataclass(frozen=True)
class LogSection:
    """What is told."""

    every: int = 1
    """Steps between lines of metrics."""
    tensorboard: bool = True
    """Write for TensorBoard beside metrics.jsonl."""
    timeline: bool = True
    """At the end, draw the last step's measured timeline under the simulated one."""


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run."""

    output: str = "runs/penstock"
    """The run's folder: checkpoints, metrics, a copy of the settings."""
    model: ModelSection = field(default_factory=ModelSection)
    rope: RopeSection = field(default_factory=RopeSection)
    experts: ExpertsSection = field(default_factory=ExpertsSection)
    data: DataSection = field(default_factory=DataSection)
    parallel: ParallelSection = field(default_factory=ParallelSection)
    schedule: ScheduleSection = field(default_factory=ScheduleSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    train: TrainSection = field(default_factory=TrainSection)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    validation: ValidationSection = field(default_factory=ValidationSection)
    log: LogSection = field(default_factory=LogSection)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, section by section, as JSON can hold them."""
        return dataclasses.asdict(self)

    def flat(self) -> dict[str, Any]:
        """The same under dotted names: ``{"train.steps": 100, ...}``."""
        settings: dict[str, Any] = {}
        for name, value in self.to_dict().items():
            if isinstance(value, dict):
                settings.update({f"{name}.{key}": inner for key, inner in value.items()})
            else:
                settings[name] = value
        return settings

    def identity(self) -> dict[str, Any]:
        """The settings that decide the numbers of the run, under dotted names; equal ones continue each other.

        How a run is cut, logged, saved or how long it lasts is left out: pipeline ranks and schedules do not change a
        single bit, tensor- and expert-parallel ranks nothing but rounding. Nor, but for rounding, do data- and
        context-parallel ranks and microbatches while the loss of a step is divided by all its tokens.
        """
        settings = self.flat()
        settings["optimizer.num_decay_steps"] = self.num_decay_steps
        free = _FREE if self.train.normalize == "global" else _FREE - _FREE_IF_GLOBAL
        return {name: value for name, value in settings.items() if not free & {name, name.partition(".")[0]}}

    def digest(self) -> str:
        """Sixteen hex digits over `identity`."""
        text = json.dumps(self.identity(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return math.prod(self.parallel.sizes.values())

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into; in a bidirectional schedule each is held twice."""
        return self.schedule.choice.placement(self.parallel.pp).stages_per_route

    @property
    def num_units(self) -> int:
        """Pieces that stages are cut from: embedding, two halves a layer, head."""
        return 2 * self.model.num_layers + 2

    @property
    def num_decay_steps(self) -> int | None:
        """The step at which the learning rate has fallen; None when neither rate nor decay ever moves."""
        moves = self.optimizer.decay in ("linear", "cosine") or self.optimizer.final_weight_decay is not None
        return (self.optimizer.num_decay_steps or self.train.steps) if moves else None


# Settings, or whole sections, that a continued run may change.
_FREE_IF_GLOBAL = frozenset({"parallel.dp", "parallel.cp", "train.num_microbatches", "train.max_microbatch_tokens"})
_FREE = _FREE_IF_GLOBAL | {
    "output",
    "log",
    "checkpoint",
    "validation",
    "schedule",
    "train.steps",
    "data.cache",
    "parallel.pp",
    "parallel.tp",
    "parallel.ep",
    "parallel.order",
    "parallel.attention",
    "optimizer.zero",
    "parallel.device",
    "parallel.elastic",
    "parallel.num_threads",
    "parallel.timeout_s",
}


def differences(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], here: str = "here", there: str = "there"
) -> list[str]:
    """The names of settings that differ, each with both values: ``train.seed (1 here, 2 there)``."""
    return [
        f"{name} ({ours.get(name)!r} {here}, {theirs.get(name)!r} {there})"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]

"""Closed formulas for a decoder's units: arithmetic, bytes read and written, bytes kept, messages.

They hold for one rank of a layout and one microbatch. The residual stream between tensor-parallel products is cut by
tokens (sequence parallelism), as the engine cuts it, unless a run says otherwise.

Source: products and kept bytes as in Reducing Activation Recomputation (arXiv 2205.05198, sections 4 and 5), for
RMSNorm, gated MLPs, grouped heads and experts alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from penstock.planner.shape import ATTENTION, EXPERTS, MAMBA, MLP, ModelShape

# Bytes of an fp32 gradient, read and written, and of a logit through the loss: in 16 bits and in fp32 written and read.
_GRADIENT, _LOGIT = 8, 12
# Products of attention's backward for each of its forward's two: the scores are computed again (FlashAttention).
_CORE_BACKWARD = 2.5
# Tokens of a chunk of the scan.
_CHUNK = 128
# Logits that the engine's loss goes through at a time on a GPU, in fp32.
_LOSS_BLOCK = 1 << 26


class RecomputedPart(Enum):
    """The part of forward that backward computes again.

    CORE: attention's own products. ALTERNATE: every second product with weights and all that lies between products, as
    torchtitan's selective checkpointing of operations does. FULL: all of each unit.
    """

    NONE = "none"
    CORE = "core"
    ALTERNATE = "alternate"
    FULL = "full"


class MessageKind(Enum):
    """The kind of traffic between ranks."""

    TENSOR = "tp"
    CONTEXT = "cp"
    EXPERTS = "ep"
    PIPELINE = "pp"
    GRADIENTS = "dp"


@dataclass(frozen=True)
class Work:
    """One pass of a microbatch through a unit on one rank.

    `flops` are those of products in the run's dtype, and `narrow_flops` the same, each divided by the narrowest side of
    its weight; `core_flops` are those that stay in 16 bits (attention's own). The last three are bytes that the rank
    sends to those with which it shares layers, sequences and experts.
    """

    flops: float = 0.0
    narrow_flops: float = 0.0
    core_flops: float = 0.0
    traffic_bytes: float = 0.0
    tensor_bytes: float = 0.0
    context_bytes: float = 0.0
    expert_bytes: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def times(self, factor: float) -> Work:
        return Work(*(getattr(self, name) * factor for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class UnitCosts:
    """A unit on one rank: its passes, what they keep, and its parameters.

    `kept_bytes` lie on the tape from F until I or B, and `weight_bytes` from I until W: inputs of products and
    gradients of their outputs. `transient_bytes` are alive besides while the unit runs.
    """

    name: str
    forward: Work
    backward_input: Work
    backward_weight: Work
    kept_bytes: float
    weight_bytes: float
    parameters: float
    expert_parameters: float = 0.0
    transient_bytes: float = 0.0


@dataclass(frozen=True)
class Style:
    """The ways of an engine; the defaults are this engine's, the others those of published runs."""

    early_gradients: bool = True
    #: False where every tensor-parallel rank keeps the whole residual stream
    sequence_parallel: bool = True
    #: False where attention writes its scores, as before FlashAttention
    fused_attention: bool = True
    #: False where norms, activations and sums are kernels of their own, which write and read what lies between them
    fused_elements: bool = True
    #: False where the loss and the last norm are operations of their own in fp32
    fused_loss: bool = True
    #: True for what this engine keeps: no logits in fp32, and with tensor parallelism the stream once more
    own_engine: bool = True
    #: True if tensor-parallel messages are in flight while products compute
    overlapped_tensor: bool = False
    #: False where the operands of 8-bit products are scaled and cast by kernels of their own
    fused_casts: bool = True
    #: False where a round of the ring takes as long as all scores between the queries of a rank and the keys of another
    balanced_ring: bool = True
    #: the share of the peak that attention's own products reach; 0 for what follows from the constants
    attention: float = 0.0
    #: ranks that share experts, if ranks of tp are among them
    folded_ep: int = 0
    #: bytes of a parameter and of its gradient between steps; 0 for this engine's
    parameter_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(frozen=True)
class UnitSize:
    """The size of a microbatch, and how many ranks share a unit."""

    seq_len: int
    microbatch: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    recompute: RecomputedPart = RecomputedPart.NONE
    style: Style = Style()
    #: of a parameter and of an activation
    element_bytes: int = 2
    #: of tokens with a label, which alone have logits
    label_share: float = 1.0

    @property
    def tokens(self) -> float:
        """The tokens of a microbatch on one context-parallel rank."""
        return self.seq_len * self.microbatch / self.cp


def unit_costs(shape: ModelShape, size: UnitSize) -> list[UnitCosts]:
    """The units of a model in order: embedding, a unit for each block, head."""
    makers, stream = {ATTENTION: _attention, MLP: _mlp, EXPERTS: _experts, MAMBA: _mamba}, _stream_bytes(shape, size)
    blocks = {kind: _unit(makers[kind](shape, size), stream, size) for kind in dict.fromkeys(shape.pattern)}
    return [_embedding(shape, size), *(blocks[kind] for kind in shape.pattern), _head(shape, size)]


def _stream_bytes(shape: ModelShape, size: UnitSize) -> float:
    """The bytes of the residual stream that a rank keeps of a microbatch."""
    shared = size.tp if size.style.sequence_parallel else 1
    return shape.stream_bytes(size.tokens, size.element_bytes) / shared


def _tensor_bytes(shape: ModelShape, size: UnitSize) -> float:
    """The bytes a rank sends in one pass: a gather before the products and a scatter after them, or one all-reduce."""
    return 2 * (size.tp - 1) / size.tp * shape.stream_bytes(size.tokens, size.element_bytes)


@dataclass(frozen=True)
class _BlockSizes:
    """The sizes on one rank that all blocks share, before recomputation."""

    name: str
    #: the products with weights, those of routed experts included
    linear: Work
    #: read by each forward, and by each backward
    weight_bytes: float
    #: reads and writes of everything else in forward
    other_bytes: float
    #: inputs of products, which W needs
    inputs_bytes: float
    #: kept besides, for I alone
    kept_bytes: float
    #: kept where every second product is recomputed
    alternate_bytes: float
    parameters: float
    expert_parameters: float = 0.0
    #: False for what follows attention in a layer
    begins_layer: bool = True
    #: attention's own products, and their traffic
    core: Work = Work()
    core_kept_bytes: float = 0.0
    #: messages of a forward, which are those of a backward too
    messages: Work = Work()


def _unit(block: _BlockSizes, stream_bytes: float, size: UnitSize) -> UnitCosts:
    """Turn a block's sizes into passes: a backward reads what forward did and the gradients of its outputs."""
    # Operands, about half of it, are read for their scales, read again, written as they are cast, and read in 8 bits.
    casts = Work(traffic_bytes=0.0 if size.style.fused_casts else block.linear.traffic_bytes + block.weight_bytes)
    linear = block.linear + casts + Work(traffic_bytes=block.weight_bytes)
    others = block.other_bytes * (1 if size.style.fused_elements else 2)
    forward = linear + Work(traffic_bytes=others) + block.core + block.messages
    own = block.parameters + block.expert_parameters
    shared = size.style.own_engine and size.tp > 1
    gathered_bytes = size.tp * stream_bytes if shared else 0.0
    inputs = linear + Work(traffic_bytes=1.5 * others) + block.core.times(_CORE_BACKWARD) + block.messages
    weights = block.linear + casts + Work(traffic_bytes=_GRADIENT * own)
    # The inputs of products wait for W with the gradients of their outputs, which are as large as what else is kept.
    for_weights = block.inputs_bytes + block.kept_bytes + gathered_bytes
    kept = block.inputs_bytes + block.kept_bytes + block.core_kept_bytes + (stream_bytes if shared else 0.0)
    transient = block.kept_bytes + stream_bytes + 2 * gathered_bytes
    if size.recompute is RecomputedPart.FULL:
        # The input alone is kept until the backward, whose I recomputes the rest; others keep that of a whole layer.
        is_input_kept = size.style.own_engine or block.begins_layer
        inputs, kept, transient = inputs + forward, stream_bytes if is_input_kept else 0.0, transient + kept
    elif size.recompute is RecomputedPart.ALTERNATE:
        again = block.linear.times(0.5) + Work(traffic_bytes=others)
        inputs, kept, transient = inputs + again, block.alternate_bytes, transient + kept - block.alternate_bytes
    elif size.recompute is RecomputedPart.CORE:
        inputs, kept, transient = inputs + block.core, kept - block.core_kept_bytes, transient + block.core_kept_bytes
    if not size.style.own_engine:
        # Many sources do not say what is recomputed, and are judged by what is needed in any case.
        transient = 0.0
    parameters = block.parameters, block.expert_parameters
    return UnitCosts(block.name, forward, inputs, weights, kept, for_weights, *parameters, transient)


def _product(tokens: float, parameters: float, narrowest: float, traffic_bytes: float = 0.0) -> Work:
    """Products of tokens with weights whose narrowest side has this number of elements."""
    flops = 2 * tokens * parameters
    return Work(flops, flops / narrowest, traffic_bytes=traffic_bytes)


def _attention(shape: ModelShape, size: UnitSize) -> _BlockSizes:
    tokens, tp = size.tokens, size.tp
    context = min(size.seq_len, shape.window or size.seq_len)
    fused = size.style.fused_attention
    # A fused kernel skips what causality masks; in a ring out of balance, that of a rank's own keys alone.
    masked = 0.0 if not fused else 0.5 if size.style.balanced_ring else 0.5 / size.cp
    core_flops = 2 * tokens * context * (shape.query_width + shape.output_width) / tp * (1 - masked)
    widths = (shape.query_width + shape.kv_width + shape.output_width) / tp
    qkv_bytes = size.element_bytes * tokens * widths
    scores = 0.0 if fused else shape.num_heads / tp * size.microbatch * size.seq_len / size.cp * size.seq_len
    stream = _stream_bytes(shape, size)
    weights = shape.block_parameters(ATTENTION) / tp
    hidden, out = shape.hidden_size, shape.hidden_size * shape.output_width / tp
    gathered = size.element_bytes * tokens * hidden
    # Each round of the ring sends the rank's keys and values; backward sends them and their gradients, here in fp32.
    directions = 2.0 if size.style.own_engine else 1.5
    ring = (size.cp - 1) * size.element_bytes * tokens * shape.kv_width / tp
    return _BlockSizes(
        "attention",
        linear=_product(tokens, weights - out, (shape.query_width + shape.kv_width) / tp)
        + _product(tokens, out, shape.output_width / tp, 2 * gathered + qkv_bytes),
        weight_bytes=size.element_bytes * weights,
        # The norm reads and writes the stream, the sum reads two and writes one; rotary positions turn q and k.
        other_bytes=5 * stream + 2 * size.element_bytes * tokens * (widths - shape.output_width / tp),
        inputs_bytes=stream + size.element_bytes * tokens * shape.output_width / tp,
        kept_bytes=stream + qkv_bytes - size.element_bytes * tokens * shape.output_width / tp,
        # Queries, values and attention's output; keys and the last product are computed again.
        alternate_bytes=stream + qkv_bytes - size.element_bytes * tokens * shape.kv_width / 2 / tp,
        parameters=weights,
        # Scores are written and read by the product, softmax, dropout and the second product: 13 bytes.
        core=Work(core_flops=core_flops, traffic_bytes=qkv_bytes + 13 * scores),
        core_kept_bytes=5 * scores,
        messages=Work(tensor_bytes=_tensor_bytes(shape, size), context_bytes=directions * ring),
    )


def _mlp(shape: ModelShape, size: UnitSize, kind: str = MLP) -> _BlockSizes:
    """An MLP that all tokens go through, or what experts share, with its norm and its sum."""
    width = shape.intermediate_size if kind == MLP else shape.shared_size
    tokens, tp, stream = size.tokens, size.tp, _stream_bytes(shape, size)
    weights = shape.block_parameters(kind) / tp
    inner = size.element_bytes * tokens * width / tp
    ups = shape.num_products - 1
    gathered = size.element_bytes * tokens * shape.hidden_size
    return _BlockSizes(
        "mlp",
        linear=_product(
            tokens, weights, min(shape.hidden_size, width / tp or math.inf), 2 * gathered + (ups + 1) * inner
        ),
        weight_bytes=size.element_bytes * weights,
        other_bytes=5 * stream + (ups + 1) * inner,
        inputs_bytes=stream + inner,
        kept_bytes=stream + ups * inner,
        # The last product's output is needed by no backward, which only a compiler sees.
        alternate_bytes=ups * inner / 2 + (0.0 if size.style.fused_elements else stream),
        parameters=weights,
        begins_layer=False,
        messages=Work(tensor_bytes=_tensor_bytes(shape, size)),
    )


def _mamba(shape: ModelShape, size: UnitSize) -> _BlockSizes:
    """A Mamba-2 mixer: its products with weights, its convolution and gate, and its scan by chunks.

    Source of the scan: arXiv 2405.21060, section 6.
    """
    tokens, tp, stream = size.tokens, size.tp, _stream_bytes(shape, size)
    weights = shape.mamba_parameters / tp
    inner, state = shape.mamba_size / tp, shape.mamba_state_size
    # Gate, convolved input, output; keys and queries of the scan are those of few heads, and narrow.
    widths = size.element_bytes * tokens * (shape.mamba_parameters / shape.hidden_size) / tp
    # Each chunk of tokens has its scores, is multiplied with them, and gives and takes a state, which is kept in fp32.
    scan_flops = 2 * tokens * inner * (_CHUNK + 2 * state)
    state_bytes = 4 * tokens * inner * state / _CHUNK
    return _BlockSizes(
        "mamba",
        linear=_product(
            tokens, weights, shape.hidden_size / tp, 2 * size.element_bytes * tokens * shape.hidden_size + widths
        ),
        weight_bytes=size.element_bytes * weights,
        other_bytes=5 * stream + 6 * widths,
        inputs_bytes=stream + widths / 3,
        kept_bytes=stream + widths,
        alternate_bytes=stream + widths / 2,
        parameters=weights,
        # Written by their chunk, read and written by the pass over chunks, and read again.
        core=Work(core_flops=scan_flops, traffic_bytes=4 * state_bytes),
        messages=Work(tensor_bytes=_tensor_bytes(shape, size)),
    )


def _experts(shape: ModelShape, size: UnitSize) -> _BlockSizes:
    shared = _mlp(shape, size, EXPERTS)
    routed_tokens = size.tokens * shape.num_active / size.tp
    own = shape.num_experts / size.ep * shape.expert_parameters
    width = shape.latent_size or shape.hidden_size
    narrowest = min(width, shape.expert_size)
    rows, inner = size.element_bytes * routed_tokens * width, size.element_bytes * routed_tokens * shape.expert_size
    ups = shape.num_products - 1
    # Others send a token once to each rank that has some of its experts, here those of chance.
    num_ranks = size.ep * (1 - (1 - 1 / size.ep) ** shape.num_active)
    sent_share = 1.0 if size.style.own_engine else num_ranks / shape.num_active
    return _BlockSizes(
        "experts",
        linear=shared.linear
        + _product(routed_tokens, shape.expert_parameters, narrowest, 2 * rows + (ups + 1) * inner),
        weight_bytes=shared.weight_bytes + size.element_bytes * own,
        # Rows are permuted by rank and by expert, and back; each time they are read and written.
        other_bytes=shared.other_bytes + 8 * rows + (ups + 1) * inner,
        inputs_bytes=shared.inputs_bytes + rows + inner,
        # Rows are kept in their own order and in that of the experts.
        kept_bytes=shared.kept_bytes + ups * inner + (2 if size.style.own_engine else 1) * rows,
        alternate_bytes=shared.alternate_bytes + ups * inner / 2 + rows,
        parameters=shared.parameters,
        expert_parameters=own,
        begins_layer=False,
        messages=shared.messages + Work(expert_bytes=2 * rows * sent_share * (size.ep - 1) / size.ep),
    )


def _embedding(shape: ModelShape, size: UnitSize) -> UnitCosts:
    stream, weights = _stream_bytes(shape, size), shape.vocab_size * shape.hidden_size / size.tp
    looked_up = size.element_bytes * size.tokens * shape.hidden_size
    passed = Work(traffic_bytes=2 * looked_up, tensor_bytes=_tensor_bytes(shape, size) / 2)
    # This engine keeps nothing but the tokens, and makes the table's gradient in the table's dtype.
    kept, gradient = (0.0, size.element_bytes * weights) if size.style.own_engine else (stream / 2, 0.0)
    return UnitCosts("embedding", passed, Work(), passed.times(2), kept, kept, weights, transient_bytes=gradient)


def _head(shape: ModelShape, size: UnitSize) -> UnitCosts:
    """The final norm, the head and the loss, whose logits others than this engine keep in 16 bits and in fp32."""
    stream, tp = _stream_bytes(shape, size), size.tp
    tokens = size.label_share * size.tokens
    weights, logits = shape.vocab_size * shape.hidden_size / tp, tokens * shape.vocab_size / tp
    gathered = size.element_bytes * size.tokens * shape.hidden_size
    product = _product(tokens, weights, shape.hidden_size, gathered + size.element_bytes * (weights + logits))
    sent = Work(tensor_bytes=_tensor_bytes(shape, size) / 2)
    loss = Work(traffic_bytes=_LOGIT * logits)
    logits_bytes = size.element_bytes * logits
    kept, transient = logits_bytes + 4 * logits, logits_bytes
    if not size.style.fused_loss:
        # Kept are the log-probabilities, and the allocator keeps the block of the logits, which is too small for them.
        # The gradients of either, and with tensor parallelism a sum of two, come besides. The gathered input of the
        # product is kept, and the block in which its parts came, which are then put in order.
        shared = tp > 1
        kept = kept + 2 * stream + (2 * gathered if shared else 0.0)
        transient = (12 if shared else 8) * logits
    if size.style.own_engine:
        # The loss needs the logits' gradient besides, and blocks of rows in fp32. A block is made before the last
        # is freed, and tensor-parallel ranks have their exchange's too.
        more, block = (logits > _LOSS_BLOCK) + (tp > 1), 4 * min(logits, _LOSS_BLOCK)
        kept, transient = logits_bytes, max(min(3, 2 + more) * block, logits_bytes + (1 + more) * block)
    return UnitCosts(
        "head",
        product + loss + sent,
        product + loss + sent,
        product + Work(traffic_bytes=_GRADIENT * weights),
        # The whole input stays on the tape, and of the rows that are read themselves and their norms.
        stream + (1 + (size.label_share < 1)) * size.label_share * stream + kept,
        size.label_share * stream + logits_bytes,
        0.0 if shape.tie_embeddings else weights,
        transient_bytes=transient,
    )

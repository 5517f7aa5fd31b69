"""Estimates of the units' work, good enough to cut a model into balanced stages before anything is measured.

Work is counted per token of a forward, in floating point operations of matrix products. Other operations count by their
time: a third of the time of forward and backward together, in operations of matrix products. The weights were measured
on one CPU core in fp32 (`python benchmarks/units.py`). Sequences are assumed to be as long as the model allows.
"""

from penstock.settings import ModelConfig

_NORM = 200.0
_ROTARY = 120.0
_GATE = 200.0
_RESIDUAL = 35.0
_EMBED = 40.0
_LOSS = 240.0
_MOVED = 80.0
"""Operations for one element of the normalised, rotated, ... tensor; of the loss, for one logit."""

_DENSE_GRADIENT = 130.0
"""For one element of the embedding's weight, once a microbatch: a full gradient tensor is added to the last one."""

_ATTENTION_KERNEL = 6.0
"""Time of an operation in the attention kernel, relative to one in a matrix product."""


def of_embedding(config: ModelConfig) -> float:
    """A lookup, and its share of a gradient as large as the weight, for microbatches of one sequence."""
    return config.hidden_size * (_EMBED + _DENSE_GRADIENT * config.vocabulary / config.max_length)


def of_attention(config: ModelConfig) -> float:
    """The projections, and attention over the average number of tokens that a token sees."""
    rotated = config.query_size + config.kv_size
    products = 2.0 * config.hidden_size * (2 * config.query_size + 2 * config.kv_size)
    seen = min(config.sliding_window or config.max_length, config.max_length)
    mean_seen = seen * (1 - seen / (2 * config.max_length))
    kernel = 4.0 * mean_seen * config.query_size * _ATTENTION_KERNEL
    normalised = config.hidden_size + (rotated if config.qk_norm else 0)
    return products + kernel + _NORM * normalised + _ROTARY * rotated + _RESIDUAL * config.hidden_size


def of_mlp(config: ModelConfig) -> float:
    """Three matrix products and the gate."""
    products = 6.0 * config.hidden_size * config.intermediate_size
    return products + _GATE * config.intermediate_size + (_NORM + _RESIDUAL) * config.hidden_size


def of_experts(config: ModelConfig) -> float:
    """The active experts, the shared expert, the router, and the permutation of rows there and back."""
    experts = config.experts
    inner = experts.num_active * experts.intermediate_size + experts.shared_size
    products = 6.0 * config.hidden_size * inner + 2.0 * config.hidden_size * experts.num_experts
    moved = _MOVED * experts.num_active * config.hidden_size
    return products + _GATE * inner + moved + (_NORM + _RESIDUAL) * config.hidden_size


def of_head(config: ModelConfig) -> float:
    """The projection, and the softmax of the loss."""
    return config.vocabulary * (2.0 * config.hidden_size + _LOSS) + _NORM * config.hidden_size


def of_predictions(config: ModelConfig) -> float:
    """For each further token: a join, a layer like the last one, and logits."""
    last = config.num_layers - 1
    mlp = of_experts(config) if config.is_sparse(last) else of_mlp(config)
    join = 4.0 * config.hidden_size**2 + 2 * _NORM * config.hidden_size
    return config.num_predictions * (join + of_attention(config.of_layer(last)) + mlp + of_head(config))

"""The decoder as a list of units, and the parts that a stage needs to run it; process groups are arguments."""

from penstock.model.arguments import NOTHING_GIVEN, BoundLayer, Given, Parameters, switch_sequentials
from penstock.model.aux_losses import AuxLoss, AuxLosses, FutureTokens
from penstock.model.decoder import decoder_units
from penstock.model.groups import ModelGroups
from penstock.model.kv_cache import (
    CachedRows,
    CachedUnit,
    CacheSize,
    KVCache,
    SlotRows,
    cached_attention,
    spare_position,
)
from penstock.model.lanes import Driven, Lane, Turn, drain, zip_lanes
from penstock.model.linear import Linear, PendingGradient, WeightGradients, defer, pack, switch_linears
from penstock.model.loss import (
    Logits,
    ShardedLogits,
    TokenStatistics,
    cross_entropy_sum,
    token_log_probs,
    token_statistics,
    whole_logits,
)
from penstock.model.matmul import WeightCasts, share_casts
from penstock.model.randomness import Randomness, kept_random_state
from penstock.model.sampling import Draw, Drawn, draw_tokens
from penstock.model.segments import (
    Compute,
    Exchange,
    RecomputedEntry,
    RecomputedLane,
    Segment,
    SegmentedUnit,
    cut,
    enter_graph,
    recomputed,
)
from penstock.model.sequences import Sequences, Spread, cut_sequences
from penstock.model.units import Limits, UnitSpec

__all__ = [
    "NOTHING_GIVEN",
    "AuxLoss",
    "AuxLosses",
    "BoundLayer",
    "CacheSize",
    "CachedRows",
    "CachedUnit",
    "Compute",
    "Draw",
    "Drawn",
    "Driven",
    "Exchange",
    "FutureTokens",
    "Given",
    "KVCache",
    "Lane",
    "Limits",
    "Linear",
    "Logits",
    "ModelGroups",
    "Parameters",
    "PendingGradient",
    "Randomness",
    "RecomputedEntry",
    "RecomputedLane",
    "Segment",
    "SegmentedUnit",
    "Sequences",
    "ShardedLogits",
    "SlotRows",
    "Spread",
    "TokenStatistics",
    "Turn",
    "UnitSpec",
    "WeightCasts",
    "WeightGradients",
    "cached_attention",
    "cross_entropy_sum",
    "cut",
    "cut_sequences",
    "decoder_units",
    "defer",
    "drain",
    "draw_tokens",
    "enter_graph",
    "kept_random_state",
    "pack",
    "recomputed",
    "share_casts",
    "spare_position",
    "switch_linears",
    "switch_sequentials",
    "token_log_probs",
    "token_statistics",
    "whole_logits",
    "zip_lanes",
]

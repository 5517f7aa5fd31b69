"""The decoder as a list of units, and what a stage needs to run them; given process groups, it never looks one up."""

from penstock.model.attention.all_to_all import ContextForm
from penstock.model.aux_losses import Ahead, LossTerms, Term
from penstock.model.cached import CachedRows, CachedUnit, CacheSize, KVCache, cached_attention
from penstock.model.casts import WeightCasts, share_casts
from penstock.model.collectives import Collectives, Observer, observe
from penstock.model.config import ModelConfig
from penstock.model.decoder import decoder_units
from penstock.model.expert_config import ExpertConfig, GroupScore, Scores
from penstock.model.groups import ModelGroups
from penstock.model.linear import Linear, PendingGradient, WeightGradients, defer, pack, switch_linears
from penstock.model.logprobs import TokenStatistics, token_log_probs, token_statistics
from penstock.model.loss import cross_entropy_sum
from penstock.model.recompute import recomputed
from penstock.model.sampling import Draw, Drawn, draw_tokens
from penstock.model.sampling_params import SamplingParams
from penstock.model.segments import (
    Beside,
    Compute,
    Exchange,
    Lane,
    RecomputedLane,
    Segment,
    SegmentedUnit,
    Travelling,
    Turn,
    cut,
    enter_graph,
)
from penstock.model.sequences import Sequences, Spread
from penstock.model.sharded_logits import Logits, ShardedLogits, whole_logits
from penstock.model.slot_rows import SlotRows, spare_position
from penstock.model.units import Limits, Shard, UnitSpec

__all__ = [
    "Ahead",
    "Beside",
    "CacheSize",
    "CachedRows",
    "CachedUnit",
    "Collectives",
    "Compute",
    "ContextForm",
    "Draw",
    "Drawn",
    "Exchange",
    "ExpertConfig",
    "GroupScore",
    "KVCache",
    "Lane",
    "Limits",
    "Linear",
    "Logits",
    "LossTerms",
    "ModelConfig",
    "ModelGroups",
    "Observer",
    "PendingGradient",
    "RecomputedLane",
    "SamplingParams",
    "Scores",
    "Segment",
    "SegmentedUnit",
    "Sequences",
    "Shard",
    "ShardedLogits",
    "SlotRows",
    "Spread",
    "Term",
    "TokenStatistics",
    "Travelling",
    "Turn",
    "UnitSpec",
    "WeightCasts",
    "WeightGradients",
    "cached_attention",
    "cross_entropy_sum",
    "cut",
    "decoder_units",
    "defer",
    "draw_tokens",
    "enter_graph",
    "observe",
    "pack",
    "recomputed",
    "share_casts",
    "spare_position",
    "switch_linears",
    "token_log_probs",
    "token_statistics",
    "whole_logits",
]

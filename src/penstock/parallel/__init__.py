"""The process grid, its groups, and the reduction of gradients over it; no other room but `schedule` is imported."""

from penstock.parallel.buckets import Bucket, Fragment, Reduction
from penstock.parallel.context import ContextCut, cut_sequences
from penstock.parallel.gradients import GradientBuckets, sum_tied
from penstock.parallel.host import gather_json
from penstock.parallel.layout import Coordinates, Grid, Layout

__all__ = [
    "Bucket",
    "ContextCut",
    "Coordinates",
    "Fragment",
    "GradientBuckets",
    "Grid",
    "Layout",
    "Reduction",
    "cut_sequences",
    "gather_json",
    "sum_tied",
]

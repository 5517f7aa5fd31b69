"""The process grid, its groups, and the reduction of gradients over it; no other room but `schedule` is imported."""

from penstock.parallel.exchange import gather_json
from penstock.parallel.gradients import Bucket, GradientBuckets, Reduction, sum_tied
from penstock.parallel.layout import Coordinates, Grid, Layout

__all__ = ["Bucket", "Coordinates", "GradientBuckets", "Grid", "Layout", "Reduction", "gather_json", "sum_tied"]

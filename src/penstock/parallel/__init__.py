"""The process grid, its groups, the collectives over them, and the reduction of gradients; it imports no model."""

from penstock.parallel.collectives import Collectives, Handle, Observer, gather_uneven, observe
from penstock.parallel.gradients import Bucket, GradientBuckets, Place, Reduction, StateBytes, sum_tied
from penstock.parallel.host import gather_json
from penstock.parallel.layout import Coordinates, Grid, Layout
from penstock.parallel.sequence_cut import ContextCut, cut_sequences

__all__ = [
    "Bucket",
    "Collectives",
    "ContextCut",
    "Coordinates",
    "GradientBuckets",
    "Grid",
    "Handle",
    "Layout",
    "Observer",
    "Place",
    "Reduction",
    "StateBytes",
    "cut_sequences",
    "gather_json",
    "gather_uneven",
    "observe",
    "sum_tied",
]

"""The groups of the process grid, the collectives over them, and the reduction of gradients; it imports no model."""

from penstock.parallel.collectives import Collectives, Handle, Observer, gather_uneven, observe
from penstock.parallel.gradients import Bucket, GradientBuckets, Place, Reduction, StateBytes, sum_tied
from penstock.parallel.grid import Grid, connect
from penstock.parallel.host import gather_json
from penstock.parallel.sequence_cut import ContextCut, cut_sequences

__all__ = [
    "Bucket",
    "Collectives",
    "ContextCut",
    "GradientBuckets",
    "Grid",
    "Handle",
    "Observer",
    "Place",
    "Reduction",
    "StateBytes",
    "connect",
    "cut_sequences",
    "gather_json",
    "gather_uneven",
    "observe",
    "sum_tied",
]

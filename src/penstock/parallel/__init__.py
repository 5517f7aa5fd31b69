"""The groups of the process grid, the collectives over them, and the reduction of gradients; it imports no model."""

from penstock.parallel.collectives import Collectives, Handle, Observer, gather_uneven, observe, share_buffers
from penstock.parallel.gradients import Bucket, GradientBuckets, Place, Reduction, StateBytes, sum_tied
from penstock.parallel.grid import Grid, connect
from penstock.parallel.host import gather_json
from penstock.parallel.tensor_slice import laid_out

__all__ = [
    "Bucket",
    "Collectives",
    "GradientBuckets",
    "Grid",
    "Handle",
    "Observer",
    "Place",
    "Reduction",
    "StateBytes",
    "connect",
    "gather_json",
    "gather_uneven",
    "laid_out",
    "observe",
    "share_buffers",
    "sum_tied",
]

"""The groups of the process grid, the collectives over them, and the reduction of gradients; it imports no model."""

from penstock.parallel.collectives import Handle, gather_uneven, share_buffers
from penstock.parallel.gradients import Bucket, GradientBuckets, Place, Reduction, sum_tied
from penstock.parallel.grid import Grid, connect
from penstock.parallel.host import gather_json
from penstock.parallel.tensor_slice import laid_out

__all__ = [
    "Bucket",
    "GradientBuckets",
    "Grid",
    "Handle",
    "Place",
    "Reduction",
    "connect",
    "gather_json",
    "gather_uneven",
    "laid_out",
    "share_buffers",
    "sum_tied",
]

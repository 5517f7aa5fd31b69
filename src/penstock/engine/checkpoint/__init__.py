"""Checkpoints: saved beside training, whole or not at all, and read by any layout."""

from penstock.engine.checkpoint.load import CheckpointReader
from penstock.engine.checkpoint.manifest import CheckpointError, CheckpointInfo, DamagedCheckpoint
from penstock.engine.checkpoint.save import AnotherRun, Checkpointer

__all__ = [
    "AnotherRun",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointReader",
    "Checkpointer",
    "DamagedCheckpoint",
]

"""Checkpoints: saved beside training, whole or not at all, and read by any layout."""

from penstock.engine.checkpoint.checkpointer import AnotherRun, Checkpointer, CheckpointReader
from penstock.engine.checkpoint.manifest import CheckpointError, CheckpointInfo, DamagedCheckpoint

__all__ = [
    "AnotherRun",
    "CheckpointError",
    "CheckpointInfo",
    "CheckpointReader",
    "Checkpointer",
    "DamagedCheckpoint",
]

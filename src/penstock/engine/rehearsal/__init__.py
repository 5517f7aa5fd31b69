"""Rehearsals: one rank's training step by the engine's own code, on tensors without data, with nobody else there."""

from penstock.engine.rehearsal.step import RehearsedBatch, rehearse, rehearse_run

__all__ = ["RehearsedBatch", "rehearse", "rehearse_run"]

"""Rehearsals: one rank's training step by the engine's own code, on tensors without data, with nobody else there."""

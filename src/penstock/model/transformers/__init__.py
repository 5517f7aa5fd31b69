"""Causal models of the transformers library, cut into a stage's units."""

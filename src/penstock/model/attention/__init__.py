"""Attention over packed sequences: on one rank, round a ring of ranks, and by exchanging heads for tokens."""

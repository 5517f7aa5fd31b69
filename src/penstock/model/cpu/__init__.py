"""The parts for CPUs alone: reproducible tokens, weights as whole numbers, and memory of the host."""

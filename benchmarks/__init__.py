"""Benchmarks, the sources of the documentation's figures; every ratio is taken in one run."""

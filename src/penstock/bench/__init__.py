"""The benchmarks behind `penstock bench`; every figure in the documentation names the command that printed it."""

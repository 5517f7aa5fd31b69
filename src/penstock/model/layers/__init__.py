"""The decoder's layers, each with the form that ranks of a tensor-parallel or context-parallel group compute."""

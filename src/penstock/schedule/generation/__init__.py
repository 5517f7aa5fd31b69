"""The scheduler of generation: it decides which sequences compute next, and in which rows of the KV cache."""

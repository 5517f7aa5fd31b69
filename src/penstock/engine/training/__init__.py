"""One batch: the training step, its microbatches and losses, and scoring."""

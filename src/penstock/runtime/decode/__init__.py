"""Generation on a rank: the loop over batches, the relay of their headers, and decoding over fixed shapes."""

"""What `penstock bench` measures; every figure in the documentation names the command here that printed it."""

"""The parts for CUDA alone: attention by flash kernels."""

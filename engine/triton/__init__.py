"""Kernels in Triton: for NVIDIA GPUs, and on a CPU in Triton's interpreter, for tests."""

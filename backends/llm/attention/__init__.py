"""Attention over paged keys and values: the reference on SDPA, and our own kernels for CUDA."""

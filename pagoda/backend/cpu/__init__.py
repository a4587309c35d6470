"""The CPU backend: compiled kernels."""

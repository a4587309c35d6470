"""The reference backend: plain PyTorch, the specification of the others."""

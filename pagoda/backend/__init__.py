"""Backends: devices and the operations that a model needs of them."""

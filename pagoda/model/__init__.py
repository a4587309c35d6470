"""Decoder models: their shape, their weights and their arithmetic in terms of a backend."""

"""Measurements of the backend of GPUs on a card."""

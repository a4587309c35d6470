"""Measurements of the CPU backend."""

"""Admission to waiting queues, of engines and of the dispatchers in front of them."""

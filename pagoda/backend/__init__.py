"""What a device provides: the operations a model needs."""

"""What the backend of GPUs makes of a card."""

"""Routes that answer with vectors, scores and ranks of texts."""

"""Routes that vLLM's server has besides those of OpenAI, Anthropic and others."""

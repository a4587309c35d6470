"""The routes that SGLang's server has of its own."""

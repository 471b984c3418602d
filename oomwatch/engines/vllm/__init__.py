"""Facts about vLLM."""

"""Facts about SGLang."""

"""Tables of the memory model: cards, KV formats, popular models."""

"""The kinds of receivers, one module each."""

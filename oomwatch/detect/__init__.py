"""Seeing events as they happen: conditions on samples, forecasts, and which event is which."""

"""One file per place that data comes from."""

"""What differs per engine and release: flags, log patterns, prefixes, metric names. Data first."""

"""From a cause to what to do about it: steps, flags valid for the version, effects, renderings."""

"""One training run on one machine."""

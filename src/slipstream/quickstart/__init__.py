"""``slipstream quickstart``: a pair that comes with the package, trained, measured and exported in one command."""

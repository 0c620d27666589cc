"""The frozen target: loading it and reading its context features."""

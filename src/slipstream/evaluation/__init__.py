"""Measure a drafter on held-out prompts, tell what was found, and keep the record."""

"""Drafter directories for the programs that serve them."""

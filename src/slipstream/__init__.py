"""Slipstream trains DFlash drafters for speculative decoding, and proves what it trained. Importing it loads no torch."""

__version__ = "0.1.0"

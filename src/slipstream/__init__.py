"""Slipstream trains DFlash drafters for speculative decoding, and proves them. Importing it loads no torch."""

__version__ = "0.1.0"

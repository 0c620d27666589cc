"""Things that several tests build. No test imports another test."""

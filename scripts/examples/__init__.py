"""Training loops that can be read from top to bottom: `python -m turngym.scripts.examples.opd`."""

"""Seeded ALFWorld games that need no download."""

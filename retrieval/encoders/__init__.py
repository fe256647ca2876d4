"""Encoders: text to vectors for dense retrieval."""

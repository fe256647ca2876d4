"""Algorithms by name, each a frozen composition of pieces in a file of its own."""

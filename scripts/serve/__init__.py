"""Servers: one module per verb of `turngym serve`."""

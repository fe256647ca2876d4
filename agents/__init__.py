"""Agents: what speaks to an environment, from a person at the terminal to a model with its KV cache."""

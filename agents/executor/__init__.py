"""Rollouts in other processes or on a Ray cluster."""

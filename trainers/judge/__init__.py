"""Judges with hindsight: reading their votes, which turns they leave in training, and the targets they give."""

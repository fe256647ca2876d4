"""Evaluation on panels: play, score, estimate, show."""

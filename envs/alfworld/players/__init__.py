"""Experts for ALFWorld, what they know, and plausible mistakes."""

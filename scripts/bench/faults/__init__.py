"""Faults on purpose: killed processes, changed bytes, senseless actions, two at once; what was tried, what failed."""

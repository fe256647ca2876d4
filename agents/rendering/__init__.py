"""Conversations as token ids that only grow, with any chat template."""

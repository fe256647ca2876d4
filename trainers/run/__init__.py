"""A run: its loop, optimizer steps, checkpoints, metrics and folder."""

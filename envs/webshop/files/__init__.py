"""The original's files: read, streamed, or mapped from disk for large shops."""

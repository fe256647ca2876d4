"""The `turngym` command: one verb per module of this folder."""

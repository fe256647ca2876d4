"""The verbs of the `turngym` command: wiring only."""

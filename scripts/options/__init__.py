"""What the verbs of the `turngym` command can be told: dataclasses only."""

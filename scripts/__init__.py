"""The verbs of the `turngym` command: one module each, and the options that they take."""

"""The papers' own runs as commands: which runs there are, their steps, and the verb."""

"""The shop's pages as a state machine, and how they are shown."""

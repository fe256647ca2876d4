"""The native engine: a game file read once, its state, rules and goal."""

"""`turngym bench proxy` and `turngym bench live`: clients that talk to a proxy, and what became of their turns."""

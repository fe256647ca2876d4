"""`turngym bench loss`: time and memory of losses and of a whole step."""

"""`turngym bench growth`: CPU time and memory by size, each cell in a process of its own."""

"""`turngym bench retrieval`: load, quality and growth, against a server that works as Search-R1's does."""

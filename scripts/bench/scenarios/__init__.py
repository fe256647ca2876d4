"""`turngym bench scenarios`: settings in which each algorithm's claim can be seen, against its control."""

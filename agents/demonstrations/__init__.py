"""Who demonstrates to a student, which of it counts, and where a student goes on from it."""

"""What a comparison of methods over seeds, worlds and tasks says: records of runs, results, tables."""

"""Trainers: turn-indexed token traces in, better students out. Importing this package loads nothing; its modules need
the extra `train` (`pip install 'turngym[train]'`) where they use torch."""

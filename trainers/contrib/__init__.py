"""Methods of papers that the core does without: each is written as another package would write it.

They use the names on docs/write_an_algorithm.md and nothing else; nothing imports them.
"""

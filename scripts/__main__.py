"""`python -m turngym.scripts` is the `turngym` command."""

from turngym.scripts.main import command

command()

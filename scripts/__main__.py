"""`python -m turngym.scripts` is the `turngym` command."""

from turngym.scripts.command import command

command()

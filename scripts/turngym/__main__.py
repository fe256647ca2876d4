"""`python -m turngym`: the same as the `turngym` command."""

from turngym.scripts.command import command

if __name__ == "__main__":
    command()

"""What another package can add to turngym: an environment, a judge and an algorithm, each in one file."""

from turngym_example import guess as guess

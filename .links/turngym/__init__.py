"""turngym: language-agent benchmarks as Gymnasium environments, and turn-aware training on their traces.

`turngym.envs`, `turngym.agents`, `turngym.trainers` and `turngym.retrieval` are the rooms; each lists its public names.
This package holds nothing but the version, so that importing one room never loads another.
"""

__version__ = "0.2.0"

"""turngym: language-agent benchmarks as Gymnasium environments, and turn-aware training on their traces.

    import gymnasium as gym, turngym.envs                      # registers turngym/ALFWorld-v0, WebShop-v0, Search-v0
    env = gym.make("turngym/ALFWorld-v0", split="generated")   # text in, text out; needs no data
    observation, info = env.reset(seed=0)
    observation, reward, terminated, truncated, info = env.step(info["admissible_actions"][0])

    result = turngym.evaluate("alfworld-quickstart", "expert", samples=1, limit=5)
    print(result)                                              # Avg@1 with its interval, by category
    teacher = turngym.load_world("alfworld").checkpoint("teacher")       # tiny models that come along
    student = turngym.load_world("alfworld").checkpoint("student")
    turngym.train("turnopd", student=student, teacher=teacher, out="runs/turnopd", steps=20)

`turngym.envs`, `turngym.agents`, `turngym.trainers` and `turngym.retrieval` are the rooms; each lists its public names.
The three functions are loaded when they are asked for, so that importing one room never loads another.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
_FROM = {"evaluate": "turngym.agents", "train": "turngym.trainers", "load_world": "turngym.agents.worlds"}
__all__ = ["__version__", *_FROM]


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module 'turngym' has no attribute {name!r}; it has {', '.join(_FROM)} and the rooms")
    return getattr(import_module(_FROM[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_FROM})

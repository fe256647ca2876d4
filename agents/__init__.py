"""Agents and rollouts: play episodes of any environment with any agent, evaluate on panels, in this process or many.

    from turngym.agents import evaluate
    print(evaluate("alfworld-generated-eval", "expert", samples=1, limit=10))

The names in `__all__` may be relied on; each is imported when it is first used (no torch before a model is opened).
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

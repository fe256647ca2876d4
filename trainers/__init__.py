"""Turn-aware training on traces: `train()` for a whole run, `Trainer` for one put together by hand.

    from turngym.trainers import train
    train("turnopd", student="models/student", teacher="models/teacher", out="runs/turnopd", steps=50)

The names in `__all__` may be relied on; each is imported when it is first used, so that importing this loads no torch.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

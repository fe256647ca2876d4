"""What every room needs and is of none: tasks, episodes, traces, protocols, errors, settings, files, processes, HTTP.

    from turngym.core import Task, read_trace

`__init__.pyi` lists the public names; each is imported when it is first used.
"""

import lazy_loader as _lazy

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

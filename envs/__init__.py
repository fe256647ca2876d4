"""Language-agent environments. Importing this registers their ids with Gymnasium and reads no data.

import gymnasium, turngym.envs
env = gymnasium.make("turngym/ALFWorld-v0")

The names in `__all__` may be relied on; each is imported when it is first asked for.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from turngym.envs.registration import register as _register

_HOME = {
    "ActionGuard": "guard",
    "Channel": "channels",
    "EnvBackendError": "core",
    "EnvContract": "testing",
    "Episode": "episode",
    "EpisodeError": "episode",
    "OnInvalid": "guard",
    "Outcome": "base",
    "Panel": "panels",
    "PanelError": "panels",
    "Player": "base",
    "ResetNeeded": "base",
    "Status": "episode",
    "Task": "core",
    "TaskError": "core",
    "TextEnv": "base",
    "TextVectorEnv": "vector",
    "ToolSpec": "core",
    "TraceError": "trace",
    "TraceWriter": "trace",
    "Turn": "episode",
    "TurngymError": "core",
    "UnicodeText": "spaces",
    "Verdict": "core",
    "assert_disjoint": "panels",
    "check_contract": "testing",
    "collect_tasks": "panels",
    "content_hash": "core",
    "guard_of": "guard",
    "list_panels": "panels",
    "load_panel": "panels",
    "make_channel": "channels",
    "make_env": "registration",
    "make_panel": "panels",
    "make_vec": "registration",
    "panel_of_env": "panels",
    "read_trace": "trace",
    "register": "registration",
    "verify_panel": "panels",
    "write_panel": "panels",
}
"""Public name -> module of this folder; `__init__.pyi` says the same to type checkers, and a test compares the two."""
__all__ = list(_HOME)

for _env_id, _env_class in (
    ("turngym/ALFWorld-v0", "turngym.envs.alfworld.env:ALFWorldEnv"),
    ("turngym/WebShop-v0", "turngym.envs.webshop.env:WebShopEnv"),
    ("turngym/Search-v0", "turngym.envs.search.env:SearchEnv"),
):
    _register(_env_id, _env_class)


def __getattr__(name: str) -> _Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Language-agent environments. Importing this registers their ids with Gymnasium and reads no data.

    import gymnasium, turngym.envs
    env = gymnasium.make("turngym/ALFWorld-v0")

The names in `__all__` may be relied on; each is imported when it is first used.
"""

from turngym.envs.common.lazy import lazy as _lazy
from turngym.envs.registration import register as _register

_PUBLIC = {
    "ActionGuard": "turngym.envs.guard",
    "Channel": "turngym.envs.channels",
    "CollectRequest": "turngym.envs.protocols",
    "EnvBackendError": "turngym.envs.core",
    "EnvContract": "turngym.envs.testing",
    "Episode": "turngym.envs.episode",
    "EpisodeError": "turngym.envs.episode",
    "GenerateRequest": "turngym.envs.protocols",
    "Generation": "turngym.envs.protocols",
    "Judge": "turngym.envs.protocols",
    "JudgeRequest": "turngym.envs.protocols",
    "Judgment": "turngym.envs.protocols",
    "OnInvalid": "turngym.envs.guard",
    "Outcome": "turngym.envs.base",
    "Panel": "turngym.envs.panels",
    "PanelError": "turngym.envs.panels",
    "Player": "turngym.envs.base",
    "Policy": "turngym.envs.protocols",
    "ResetNeeded": "turngym.envs.base",
    "Sampling": "turngym.envs.protocols",
    "Scorer": "turngym.envs.protocols",
    "Status": "turngym.envs.episode",
    "Task": "turngym.envs.core",
    "TaskError": "turngym.envs.core",
    "TextEnv": "turngym.envs.base",
    "TextVectorEnv": "turngym.envs.vector",
    "ToolSpec": "turngym.envs.core",
    "TopK": "turngym.envs.episode",
    "TraceError": "turngym.envs.trace",
    "TraceWriter": "turngym.envs.trace",
    "Turn": "turngym.envs.episode",
    "TurngymError": "turngym.envs.core",
    "UnicodeText": "turngym.envs.spaces",
    "Verdict": "turngym.envs.core",
    "assert_disjoint": "turngym.envs.panels",
    "check_contract": "turngym.envs.testing",
    "collect_tasks": "turngym.envs.panels",
    "content_hash": "turngym.envs.core",
    "guard_of": "turngym.envs.guard",
    "list_panels": "turngym.envs.panels",
    "load_panel": "turngym.envs.panels",
    "make_channel": "turngym.envs.channels",
    "make_env": "turngym.envs.registration",
    "make_panel": "turngym.envs.panels",
    "make_vec": "turngym.envs.registration",
    "panel_of_env": "turngym.envs.panels",
    "read_trace": "turngym.envs.trace",
    "register": "turngym.envs.registration",
    "verify_panel": "turngym.envs.panels",
    "write_panel": "turngym.envs.panels",
}
"""Public name -> module that has it; `__init__.pyi` says the same to type checkers."""

__all__ = list(_PUBLIC)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__, __dir__ = _lazy(__name__, _PUBLIC)

for _env_id, _env_class in (
    ("turngym/ALFWorld-v0", "turngym.envs.alfworld.env:ALFWorldEnv"),
    ("turngym/WebShop-v0", "turngym.envs.webshop.env:WebShopEnv"),
    ("turngym/Search-v0", "turngym.envs.search.env:SearchEnv"),
):
    _register(_env_id, _env_class)

"""Language-agent environments. Importing this registers their ids with Gymnasium and reads no data.

    import gymnasium, turngym.envs
    env = gymnasium.make("turngym/ALFWorld-v0")

`__init__.pyi` lists the public names; each is imported when it is first used.
"""

import lazy_loader as _lazy

from turngym.envs.registration import register as _register

__getattr__, __dir__, __all__ = _lazy.attach_stub(__name__, __file__)

for _env_id, _env_class in (
    ("turngym/ALFWorld-v0", "turngym.envs.alfworld.env:ALFWorldEnv"),
    ("turngym/WebShop-v0", "turngym.envs.webshop.env:WebShopEnv"),
    ("turngym/Search-v0", "turngym.envs.search.env:SearchEnv"),
):
    _register(_env_id, _env_class)

"""WebShop for verifiers: `vf-eval turngym-webshop -m MODEL --no-push`."""

import verifiers.v1 as vf

from turngym.agents.adapters.verifiers import PanelConfig, PanelEnv, PanelHarness, PanelTask, PanelTaskset

__all__ = ["PanelEnv", "PanelHarness", "WebShopTaskset"]


class WebShopConfig(PanelConfig):
    panel: str = "webshop-1k-eval"
    """`webshop-quickstart` needs no data."""


class WebShopTaskset(PanelTaskset, vf.Taskset[PanelTask, WebShopConfig]):
    """Tasks of `--env.taskset.panel`."""

"""Search for verifiers: `vf-eval turngym-search -m MODEL --no-push`."""

import verifiers.v1 as vf

from turngym.agents.adapters.verifiers import PanelConfig, PanelEnv, PanelHarness, PanelTask, PanelTaskset

__all__ = ["PanelEnv", "PanelHarness", "SearchTaskset"]


class SearchConfig(PanelConfig):
    panel: str = "search-multihop"
    """`search-quickstart` needs no data."""


class SearchTaskset(PanelTaskset, vf.Taskset[PanelTask, SearchConfig]):
    """Tasks of `--env.taskset.panel`."""

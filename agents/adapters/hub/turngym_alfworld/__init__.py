"""ALFWorld for verifiers: `vf-eval turngym-alfworld -m MODEL --no-push`."""

import verifiers.v1 as vf

from turngym.agents.adapters.verifiers import PanelConfig, PanelEnv, PanelHarness, PanelTask, PanelTaskset

__all__ = ["ALFWorldTaskset", "PanelEnv", "PanelHarness"]


class ALFWorldConfig(PanelConfig):
    panel: str = "alfworld-valid-unseen"
    """`alfworld-quickstart` needs no data."""


class ALFWorldTaskset(PanelTaskset, vf.Taskset[PanelTask, ALFWorldConfig]):
    """Tasks of `--env.taskset.panel`."""

"""The environments of a training run: what it trains on and is evaluated on, from its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turngym.agents.environments import env_maker, json_object
from turngym.agents.evaluation.panel_evaluation import eval_make
from turngym.agents.presets.preset import Preset
from turngym.agents.presets.published import find_preset
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rollout import MakeEnv
from turngym.agents.training.options import PlayConfig
from turngym.envs.common.rollout_side import StudentRun
from turngym.envs.panels import Panel


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnvironments:
    """Makes the environments of `run` as `play` and its preset say."""

    play: PlayConfig
    run: StudentRun

    @property
    def preset(self) -> Preset | None:
        return find_preset(self.play.preset, self.play.env)

    @property
    def given(self) -> dict[str, Any]:
        """--env-kwargs."""
        return json_object("--env-kwargs", self.play.env_kwargs)

    def settings(self, settings: ChatSettings) -> ChatSettings:
        """`settings` with what the preset says on top."""
        return settings if self.preset is None else self.preset.settings(settings, self.given)

    def maker(self, **more: Any) -> MakeEnv:
        """Makes what is trained on."""
        preset = {} if self.preset is None else self.preset.make()
        kwargs = {**preset, "split": self.play.split, "max_turns": self.run.max_turns, **self.given, **self._data}
        return env_maker(self.play.env, **kwargs, **more)

    def evaluation(self, panel: Panel) -> dict[str, Any]:
        """Arguments of `gym.make` for evaluations on `panel`, but for the data."""
        return eval_make(panel, self.play.preset, self.given, self.run)

    def evaluation_maker(self, panel: Panel, **more: Any) -> MakeEnv:
        """Makes what evaluations on `panel` play."""
        return env_maker(panel.env_id, **{**self.evaluation(panel), **more, **self._data})

    @property
    def _data(self) -> dict[str, Any]:
        return {} if self.play.data is None else {"data": self.play.data}

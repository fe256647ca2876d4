"""Chat settings of a model (channel, roles, lengths): saved beside its weights, so that every run renders alike."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from turngym.agents.agent import AgentError
from turngym.agents.rendering.memory import memory_of
from turngym.envs.common.folder_sums import FILE as SUMS
from turngym.envs.suggest import did_you_mean

FILE = "turngym.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """Everything about rendering that the weights depend on."""

    channel: str = "text"
    """`text`: <think> and <action> tags; `tool`: a function call as the chat template writes it. `tool:DIALECT` and
    `text:STYLE` (`turngym.envs.channels.make_channel`) say what the template was found to write."""
    system: str | None = None
    """The system message; None: the environment's instructions and the channel's; empty: no system message."""
    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of every observation after the first; `auto`: what the chat template keeps more of the past for."""
    thinking: bool | None = None
    """`enable_thinking` of Qwen3-style templates; None: the template's default."""
    history: Literal["template", "append"] = "template"
    """`append` keeps earlier thoughts even where the template would drop them: one segment per episode."""
    memory: str = "all"
    """What a turn's prompt holds of the episode: `all`, `window:N` (the task and the last N turns), `react` (a
    transcript). With the last two every turn is a segment of its own."""
    max_new_tokens: int = 512
    """Most ids of one response."""
    max_context: int | None = None
    """Most ids of prompt and response together; None: what the model allows."""

    def __post_init__(self) -> None:
        memory_of(self.memory)

    @property
    def identity(self) -> dict[str, Any]:
        """What tells these settings from others; what was added to them later counts where it is not its default."""
        found = asdict(self)
        if self.memory == ChatSettings.__dataclass_fields__["memory"].default:
            del found["memory"]
        return found

    def save(self, folder: str | Path) -> Path:
        """Write `turngym.json` into the model's folder."""
        path = Path(folder) / FILE
        # checksums of other settings would not fit
        (path.parent / SUMS).unlink(missing_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> ChatSettings:
        """Read `turngym.json` from the model's folder; the defaults where there is none.

        Raises:
            AgentError: the file is not JSON or has settings that do not exist.
        """
        path = Path(folder) / FILE
        if not path.exists():
            return cls()
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise AgentError(f"{path} is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise AgentError(f"{path} is a {type(values).__name__}; it must be an object of settings")
        names = [field.name for field in fields(cls)]
        for name in values:
            if name not in names:
                hint = did_you_mean(str(name), names)
                raise AgentError(f"{path}: unknown setting {name!r}; settings are {', '.join(names)}.{hint}")
        return cls(**values)

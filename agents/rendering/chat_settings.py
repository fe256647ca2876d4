"""How a model is spoken to: its chat settings, saved beside its weights so that every run renders alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import asdict

from turngym.agents.rendering.memory import Memory
from turngym.agents.rendering.verl_agent_prompts import PromptTemplates
from turngym.core.errors import AgentError, SettingsError
from turngym.core.files import SUMS_FILE
from turngym.core.nested import NONE
from turngym.core.numbers import Count
from turngym.core.spec import Spec, read
from turngym.core.user_files import json_object, text_problem
from turngym.envs.channels import require_channel

CHAT_FILE = "turngym.json"


class ChatSettings(Spec):
    """Everything about rendering that the weights depend on."""

    channel: str = "text"
    """`text` for <think> and <action> tags, `tool` for a function call as the chat template writes it. `tool:DIALECT`
    and `text:STYLE` (`turngym.envs.channels.make_channel`) name the form instead of taking the template's."""
    system: str | None = None
    """The system message; by default the environment's instructions and the channel's; empty for none."""
    observation_role: Literal["auto", "user", "tool"] = "auto"
    """Role of every observation after the first; `auto` takes the role for which the template keeps more history."""
    thinking: bool | None = None
    """`enable_thinking` of Qwen3-style templates; by default the template's own default."""
    history: Literal["template", "append"] = "template"
    """`append` keeps earlier thoughts even if the template would drop them, so an episode is one segment."""
    memory: str = "all"
    """What a turn's prompt holds of the episode: `all`, `window:N` (the task and the last N turns), `react` (a
    transcript), `verl-agent:N` (`prompts` with the last N turns). With all but the first every turn is a segment of its
    own."""
    prompts: tuple[str, str, str] | None = None
    """The templates of `verl-agent:N`: `alfworld`, `webshop` or `search`, the first turn's, and that of later ones."""
    max_new_tokens: Count = 512
    """Most ids of one response."""
    max_context: Count | None = None
    """Most ids of prompt and response together; by default what the model allows."""

    def __post_init__(self) -> None:
        self.remembers  # noqa: B018 refuses what cannot be meant
        # other people's agents write bare actions
        if self.channel != NONE:
            require_channel(self.channel)
        if (problem := text_problem(self.system or "")) is not None:
            raise SettingsError(f"system {problem}")

    @property
    def remembers(self) -> Memory:
        """`memory` with its templates."""
        if self.prompts is None:
            return Memory(self.memory)
        kind, first, later = self.prompts
        return Memory(self.memory, PromptTemplates(kind=kind, first=first, later=later))

    @property
    def identity(self) -> dict[str, Any]:
        """The settings as they are compared: `prompts` by their hash."""
        templates = self.remembers.templates
        return {**asdict(self), "prompts": None if templates is None else templates.sha256[:16]}

    def save(self, folder: str | Path) -> Path:
        """Write `turngym.json` into the model's folder."""
        path = Path(folder) / CHAT_FILE
        # the folder's checksums were made with other settings and would no longer match
        (path.parent / SUMS_FILE).unlink(missing_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> ChatSettings:
        """Read `turngym.json` from the model's folder; the defaults if there is none.

        Raises TurngymError if the file is no JSON object, or has settings that do not exist or values that cannot be.
        """
        path = Path(folder) / CHAT_FILE
        if not path.exists():
            return cls()
        return read(cls, json_object(path, AgentError), str(path))


def describe(settings: ChatSettings) -> str:
    """The resolved settings in one line for people."""
    thinking = {None: "as the template has it", True: "on", False: "off"}[settings.thinking]
    return (
        f"chat: channel {settings.channel}, observations as {settings.observation_role} messages, thinking {thinking}"
    )

"""Options of demonstrations: who demonstrates, how it is asked, and which demonstrations count."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from turngym.agents.agent_options import AgentOptions
from turngym.agents.endpoint.options import EndpointOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationOptions:
    """Demonstrations for luffy, tcod b2f and sft."""

    demonstrations: str | None = None
    """luffy, tcod b2f, sft: who demonstrates the step's tasks: `expert` or another player, `model:FOLDER`,
    `openai:MODEL`, an agent of yours as `package.module:name`, or a trace file, whose episodes are found by task. By
    default --expert."""
    demonstrated_tasks: bool = False
    """Play only tasks of which the trace file has a demonstration that counts."""
    demonstration_success: bool = False
    """Leave out demonstrations that did not succeed."""
    demonstration_reward: float | None = None
    """Leave out demonstrations that are worth less, by --reward, else by their return."""
    demonstration_fits: bool = True
    """Leave out demonstrations that, in the student's tokens, are longer than its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratorOptions(EndpointOptions):
    """How a model that demonstrates is asked (--demonstrations model:FOLDER, openai:MODEL)."""

    temperature: float = 0.85
    """Sampling temperature; 0 is greedy."""
    channel: str = "auto"
    """How it writes actions, as `--channel` of `turngym rollout`."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of its chat template, or of the endpoint."""
    system: str | None = None
    """Its system message; by default as it was trained, else the environment's instructions."""
    max_new_tokens: int | None = None
    """Most tokens of one response; by default as it was trained, else 512, at an endpoint 4096."""
    max_context: int | None = None
    """Most tokens of an episode's history and response; by default what the model allows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its weights."""

    def agent(self, name: str, *, device: str, slots: int) -> AgentOptions:
        """The options of the agent that `name` stands for."""
        given = asdict(self)
        endpoint = EndpointOptions(**{item.name: given.pop(item.name) for item in fields(EndpointOptions)})
        return AgentOptions(agent=name, endpoint=endpoint, device=device, slots=slots, **given)

    @property
    def identity(self) -> dict[str, Any]:
        """What draws other demonstrations, JSON-able."""
        free = {"base_url", "key_env", "request_deadline", "request_retries", "price_in", "price_cached", "price_out"}
        return {f"collect.demonstrator.{name}": value for name, value in asdict(self).items() if name not in free}

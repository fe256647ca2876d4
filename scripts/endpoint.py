"""Find out what an OpenAI-compatible endpoint takes and what it answers, before it plays or judges.

Examples:
    turngym endpoint check http://127.0.0.1:8000/v1 --model qwen3-8b
    turngym endpoint check https://api.openai.com/v1 --model o4-mini --channel tool --max-new-tokens 2000

Two short requests, as every evaluation and rollout sends them at its start (`--no-handshake` leaves them out there).
Refused ones cost nothing. Exit status 2 if the endpoint cannot be played so, with a line that says what would help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.endpoint.options import KEY, EndpointOptions
from turngym.agents.play_spec import OpenAI
from turngym.agents.playing.env_maker import probe
from turngym.core.errors import AgentError
from turngym.core.numbers import Count, NotNegative, Positive
from turngym.core.redaction import redacted
from turngym.core.setting import Positional
from turngym.core.spec import Spec
from turngym.core.tables import table_text
from turngym.envs.channels import make_channel
from turngym.scripts.options import read_options


class Check(Spec):
    """What is asked, and how."""

    url: Positional[str]
    """Address of the endpoint with its version, for example http://127.0.0.1:8000/v1."""
    model: str
    """Name of the model behind it."""
    channel: Literal["text", "tool"] = "text"
    """How actions are written: `text` in tags, `tool` as calls of the environment's tool."""
    env: str = "turngym/ALFWorld-v0"
    """Gymnasium id of the environment whose tool is offered."""
    key_env: str = KEY
    """Name of the environment variable that holds the key. The key itself is never an option."""
    temperature: NotNegative = OpenAI(model="").temperature
    """Sampling temperature that is asked for."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of the endpoint's chat template."""
    max_new_tokens: Count | None = None
    """Most tokens of one answer; by default 4096."""
    token_ids: bool = False
    """Ask for token ids and log-probabilities too."""
    extra_body: str = "{}"
    """Further fields of every request as JSON."""
    request_deadline: Positive = 600.0
    """Seconds for one answer, retries and waits for rate limits included."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym endpoint` with `argv` (without the verb itself)."""
    words = list(argv)
    if words and words[0] != "check" and not words[0].startswith("-"):
        raise AgentError(
            f"turngym endpoint {redacted(words[0])!r} is unknown; valid: turngym endpoint check URL --model M"
        )
    words = words[words[:1] == ["check"] :]
    return check(read_options(Check, words, prog="turngym endpoint check", about=__doc__))


def check(options: Check) -> int:
    """Shake hands with the endpoint, and print its profile."""
    tool = probe(options.env, {}).tool
    agent = EndpointAgent(
        options.model,
        EndpointOptions(
            base_url=options.url,
            key_env=options.key_env,
            request_deadline=options.request_deadline,
            token_ids=options.token_ids,
            extra_body=options.extra_body,
        ),
        make_channel(options.channel, tool),
        tool,
        temperature=options.temperature,
        thinking=options.thinking,
        max_tokens=options.max_new_tokens,
    )
    profile = agent.shake_hands()
    title = f"{options.model} at {redacted(options.url)}, channel {options.channel}"
    print(table_text((["endpoint", "found"], profile.rows()), title), end="")
    return 0

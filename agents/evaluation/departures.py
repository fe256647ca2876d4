"""Is this number the benchmark's? `departures` lists how an evaluation deviates from the original.

With a preset, the original is the preset's whole protocol, with prompts, memory and sampling. Without a preset it is
the environment alone, as ALFWorld, WebShop and Search-R1 have it: the environment itself answers an impossible action,
nothing helps, and nothing lists the possible actions. Either original is a partial `EvalSpec`, which is compared with
that of the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from turngym.agents.play_spec import EvalSpec, OnPanel, PartOfPanel, PlaySpec, Published
from turngym.agents.presets import ALFWORLD, SEARCH, WEBSHOP, Preset, find_preset
from turngym.agents.resolve_play import environment_layer, panel_layer
from turngym.core.errors import TurngymError
from turngym.core.nested import differing
from turngym.core.redaction import excerpt
from turngym.core.resolve import merged
from turngym.core.spec import to_table
from turngym.core.task import plain_id
from turngym.envs.panels import Panel, PanelError, shipped_panel

GUARD: Mapping[str, Any] = {"on_invalid": "noop", "show_admissible": False, "reading": "strict"}
"""The guard that none of the originals has."""
RULES: Mapping[str, Mapping[str, Any]] = {
    ALFWORLD: {"words": "game", "domain_randomization": False},
    WEBSHOP: {"strict_admissible": False, "backdoors": True},
    SEARCH: {},
}
"""The originals' own rules, where `gym.make` has others by default."""
JUDGED_APART = frozenset(
    {
        # which tasks are played
        *("split", "splits", "part", "profile", "source", "corpus", "price_seed", "config", "count", "held_out"),
        # what changes no episode of an agent
        *("engine", "tagger", "oracle_query", "penalty", "list_admissible", "tool_name", "tool_argument", "shop"),
        # rewards, which are no scores; retrieval has lines of its own
        *("invalid_cost", "format_scores", "retriever", "rerank"),
    }
)
"""Arguments of `gym.make` that are no departure by themselves."""
SPOKEN = ("channel", "system", "observation_role", "thinking", "max_new_tokens")
"""Settings of how a model is spoken to that presets set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Departures:
    """Deviations of an evaluation from the original, each in a few words."""

    preset: str | None
    """The original's name; None: the environment alone."""
    rules: tuple[str, ...]
    """Rules of the game, and how the agent is spoken to."""
    others: tuple[str, ...]
    """Which tasks, retrieval, scores, and what the preset itself does otherwise."""

    @property
    def beside(self) -> tuple[str, ...]:
        """Rules that were given beside a preset."""
        return () if self.preset is None else self.rules

    @property
    def all(self) -> tuple[str, ...]:
        """All deviations; empty if there are none."""
        return (*self.rules, *self.others)

    @property
    def line(self) -> str:
        """One line for people under a table."""
        original = f"the original ({self.preset})" if self.preset else "the original"
        return f"Not as {original}: {'; '.join(self.all)}" if self.all else f"As {original}"


def departures(spec: EvalSpec) -> Departures | None:
    """Returns how an evaluation or rollout deviates from the original; None if no original is known."""
    env_id = plain_id(spec.play.env.id)
    if env_id not in RULES:
        return None
    try:
        preset = find_preset(spec.preset, env_id)
    # the preset belongs to another version of turngym
    except TurngymError:
        return None
    original, played = _original(spec, preset), to_table(spec)
    rules, others = [*_rules(original, played)], [*_tasks(spec.play, env_id)]
    if spec.play.depth is not None:
        rules.append(f"episodes end after {spec.play.depth} turns")
    if env_id == SEARCH:
        others += _retrieval(spec.play.env_kwargs)
    if why := spec.play.scoring.get("approximate"):
        others.append(f"scores approximate ({why})")
    if preset is None:
        rules += _without_preset(spec)
    else:
        rules += _chat(original["agent"], played["agent"], preset)
        rules += _amount(spec, preset)
        others += [departure.text for departure in preset.differs if departure.holds(played)]
        if _harness(spec.play) is not None and env_id == ALFWORLD:
            others.append("games shuffled from the panel's order, there from the file system's")
    return Departures(preset=spec.preset, rules=tuple(rules), others=tuple(others))


def _original(spec: EvalSpec, preset: Preset | None) -> dict[str, Any]:
    """The original of the same tasks, as a table."""
    env_id = plain_id(spec.play.env.id)
    tables = [environment_layer(env_id).table]
    if (panel := panel_of(spec.play)) is not None:
        tables.append(panel_layer(panel).table)
    tables.append({"play": {"env": GUARD, "env_kwargs": RULES[env_id]}})
    if preset is not None:
        named = {"play": {"env": {name: getattr(spec.play.env, name) for name in ("tool_name", "tool_argument")}}}
        tables.append(preset.beside(named))
    return merged(tables)


def panel_of(play: PlaySpec) -> Panel | None:
    """The panel that is played, if it comes with turngym and has the recorded hash."""
    if not isinstance(play.tasks, OnPanel):
        return None
    try:
        panel = shipped_panel(play.tasks.panel)
    except PanelError:
        return None
    return panel if panel.sha256 == play.tasks.sha256 else None


def _rules(original: Mapping[str, Any], played: Mapping[str, Any]) -> Iterator[str]:
    """Arguments of `gym.make` that are not the original's."""
    for table in ("env", "env_kwargs"):
        for name, (wanted, value) in differing(original["play"][table], played["play"][table]).items():
            if name in JUDGED_APART or name == "id":
                continue
            yield f"{name} {excerpt(value, 40)}" + ("" if wanted is None else f" ({wanted})")


def _tasks(play: PlaySpec, env_id: str) -> Iterator[str]:
    kwargs, split = play.env_kwargs, play.env.split
    if env_id == ALFWORLD:
        generated = str(split).startswith("generated")
    elif env_id == WEBSHOP:
        generated = str(kwargs.get("profile")).startswith("embedded")
    else:
        generated = kwargs.get("source") == "world"
    if generated:
        yield "generated tasks"
    if not isinstance(play.tasks, OnPanel):
        yield "tasks of no panel"
    elif isinstance(play.tasks.sampling, PartOfPanel) and play.tasks.sampling.limit < play.tasks.size:
        yield play.tasks.sampling.said_of(play.tasks.size)


def _retrieval(made: Mapping[str, Any]) -> Iterator[str]:
    if made.get("rerank") is not None:
        yield "reranked passages"
    if made.get("retriever") is None:
        yield "BM25 over the questions' own passages (E5 over wiki-18)"
    else:
        name = excerpt(str(made["retriever"]), 60)
        yield f"retriever {name}, of which it is not known whether it is E5 over wiki-18"


def _harness(play: PlaySpec) -> int | None:
    """Workers of the published harness; None if all tasks of the panel are played equally often."""
    sampling = play.tasks.sampling if isinstance(play.tasks, OnPanel) else None
    return sampling.harness if isinstance(sampling, Published) else None


def _without_preset(spec: EvalSpec) -> Iterator[str]:
    memory = getattr(spec.agent.chat, "memory", None)
    if memory is not None and (kind := _memory(to_table(memory))) != "all":
        yield f"memory {kind}"
    if (workers := _harness(spec.play)) is not None:
        yield f"tasks drawn as by {workers} workers of verl-agent"


def _chat(original: Mapping[str, Any], played: Mapping[str, Any], preset: Preset) -> Iterator[str]:
    """Yields how the prompts deviate from the preset's; nothing for agents that read no prompt."""
    wanted, chat = original["chat"], played["chat"]
    if "memory" not in chat:
        return
    for name in SPOKEN:
        expected, actual = wanted.get(name), chat.get(name)
        if name not in chat or actual == expected or (expected is None and name != "channel"):
            continue
        if name == "channel" and str(actual).startswith(f"{expected}:"):
            continue
        yield "another system message" if name == "system" else f"{name} {actual} ({expected})"
    if (expected := _memory(wanted["memory"])) != (actual := _memory(chat["memory"])):
        yield f"memory {actual} ({expected})"
    if chat.get("examples") is not None and preset.name != "react":
        yield "examples in the prompt"


def _memory(table: Mapping[str, Any]) -> str:
    return f"{table['kind']}:{table['turns']}" if "turns" in table else str(table["kind"])


def _amount(spec: EvalSpec, preset: Preset) -> Iterator[str]:
    temperature, wanted = getattr(spec.agent, "temperature", None), preset.table["agent"].get("temperature")
    if temperature is not None and wanted is not None and temperature != wanted:
        yield f"temperature {temperature:g} ({wanted:g})"
    samples, workers = preset.table["play"].get("samples"), _harness(spec.play)
    if samples is not None and spec.play.samples != samples:
        yield f"{spec.play.samples} {'samples a task' if workers is None else 'validations'} ({samples})"
    if workers not in (None, HARNESS):
        yield f"{workers} workers ({HARNESS})"


HARNESS = Published().harness
"""Workers of the published harness."""

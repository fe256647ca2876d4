"""Is this number the benchmark's? `departures` says in what an evaluation was played otherwise than the original.

The original is the preset's where one was named: a whole protocol, with prompts, memory and sampling. Without a preset
it is the environment alone, as ALFWorld, WebShop and Search-R1 have it: an impossible action is played and answered as
the environment answers it, nothing helps, and nothing lists what is possible.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from turngym.agents.evaluation.results import BESIDE, DEPARTS
from turngym.agents.presets import ALFWORLD, DRAWN, SEARCH, WEBSHOP, WORDING, WORKERS, Preset
from turngym.core.redaction import brief, excerpt
from turngym.core.task import plain_id
from turngym.envs.panels import Panel

RULES: Mapping[str, Mapping[str, Any]] = {
    ALFWORLD: {"words": "game", "domain_randomization": False},
    WEBSHOP: {
        "strict_admissible": False,
        "backdoors": True,
        "compat": "webshop",
        "observation_mode": "text",
        "num_prev_obs": 0,
        "num_prev_actions": 0,
        "show_attributes": False,
    },
    SEARCH: {"topk": 3, "max_searches": None, "reward": "em", "strict_compat": False},
}
"""The originals' own rules, as arguments of gym.make."""
GUARD: Mapping[str, Any] = {"on_invalid": "noop", "show_admissible": False, "reading": "strict"}
"""The guard that none of the originals has."""
DEFAULTS: Mapping[str, Any] = {
    **GUARD,
    "on_invalid": "reject",
    **RULES[ALFWORLD],
    **RULES[WEBSHOP],
    **RULES[SEARCH],
    "strict_admissible": True,
    "backdoors": False,
    "doc_format": "search_r1",
    "doc_tokens": 256,
    "search_turns": None,
}
"""What gym.make does where nothing is given; `on_invalid` of Search is `noop`."""
TASKS = ("split", "splits", "part", "profile", "source", "data", "corpus", "price_seed", "max_turns", "config")
"""Arguments that say which tasks are played; `max_turns` is judged by itself."""
SAME = (
    *("engine", "tagger", "oracle_query", "render_mode", "channel", "tool_name", "tool_argument", "list_admissible"),
    *("penalty", "invalid_cost", "held_out", "retriever", "rerank", "format_scores", "count", "shop"),
)
"""Arguments that change no episode of an agent, or are judged by themselves."""
CHAT = ("system", "observation_role", "memory", "prompts", "thinking", "max_new_tokens", "max_context")


def departures(
    env_id: str,
    panel: Panel | None,
    preset: Preset | None,
    made: Mapping[str, Any],
    *,
    played: Mapping[str, Any],
    channel: str | None,
    temperature: float | None,
    samples: int,
    limit: int | None,
    scoring: Mapping[str, str],
    drawn: int | None = None,
) -> dict[str, list[str]]:
    """What an evaluation does otherwise than the original, each in a few words, as its records have it.

    Returns `departs`, all of it ([] if nothing is otherwise), and with a preset `beside`, the part that was given
    beside the preset. {} where no original is known.

    Args:
        env_id: Gymnasium id of the environment.
        panel: None where tasks of the environment are played and no panel.
        preset: the published set-up that is played; None: the environment's original is what is compared with.
        made: all arguments of gym.make.
        played: fields of `AgentOptions`, those of the preset included; `memory` None for agents that read no prompt.
        channel: how the agent writes actions; None for bare ones, of scripted agents.
        temperature: None for agents that do not sample.
        samples: episodes of each task; with `drawn`, validations.
        limit: how many tasks of the panel are played, from the first; None: all.
        scoring: `TextEnv.scoring`.
        drawn: workers of `--sampling published`; None where the panel's tasks are played alike.
    """
    env_id = plain_id(env_id)
    if env_id not in RULES:
        return {}
    found, rules = _tasks(env_id, panel, made, limit), _rules(env_id, panel, preset, made)
    if env_id == SEARCH:
        found += _retrieval(made)
    if why := scoring.get("approximate"):
        found.append(f"scores approximate ({why})")
    if preset is None:
        memory = played.get("memory")
        rules += [f"memory {memory}"] if memory not in (None, "all") else []
        rules += [f"tasks drawn as by {drawn} workers of verl-agent"] if drawn is not None else []
        return {DEPARTS: [*rules, *found]}
    # scripted agents read no prompt
    speaks = channel is not None and played.get("memory") is not None
    if speaks:
        rules += _chat(preset, played, channel)
    if temperature is not None and preset.temperature is not None and temperature != preset.temperature:
        rules.append(f"temperature {temperature:g} ({preset.temperature:g})")
    if preset.samples is not None and samples != preset.samples:
        what = "samples a task" if drawn is None else "validations"
        rules.append(f"{samples} {what} ({preset.samples})")
    if drawn not in (None, WORKERS):
        rules.append(f"{drawn} workers ({WORKERS})")
    # a checkout's own texts do not differ by ours, nor does who reads no prompt
    reads_own = speaks and played.get("prompts") in (None, preset.prompts)
    own = [text for text in preset.differs if text != WORDING or reads_own]
    if drawn is not None:
        own = [text for text in own if text not in DRAWN]
        own += ["games shuffled from the panel's order, there from the file system's"] if env_id == ALFWORLD else []
    return {DEPARTS: [*rules, *found, *own], BESIDE: rules}


def departs_line(departs: Sequence[str] | None, preset: str | None = None) -> str:
    """One line for people under a table; "" where no original is known."""
    if departs is None:
        return ""
    who = f"the original ({preset})" if preset else "the original"
    return f"Not as {who}: {'; '.join(departs)}" if departs else f"As {who}"


def _tasks(env_id: str, panel: Panel | None, made: Mapping[str, Any], limit: int | None) -> list[str]:
    if env_id == ALFWORLD:
        generated = str(made.get("split", "generated")).startswith("generated")
    elif env_id == WEBSHOP:
        generated = str(made.get("profile", "embedded")).startswith("embedded")
    else:
        generated = made.get("source", "world") == "world"
    found = ["generated tasks"] if generated else []
    if panel is None:
        found.append("tasks of no panel")
    elif limit is not None and limit < len(panel.tasks):
        found.append(f"the first {limit} of {len(panel.tasks)} tasks")
    return found


def _rules(env_id: str, panel: Panel | None, preset: Preset | None, made: Mapping[str, Any]) -> list[str]:
    """Arguments of gym.make that are not the preset's, else not the original's; those that nobody knows, too."""
    own = {} if preset is None else preset.make()
    wanted: dict[str, Any] = {**GUARD, **RULES[env_id], **own}
    defaults = {**DEFAULTS, **({"on_invalid": "noop"} if env_id == SEARCH else {})}
    found = list[str]()
    turns = wanted.pop("max_turns", None if panel is None else panel.make_kwargs.get("max_turns"))
    if turns is not None and made.get("max_turns", 50) != turns:
        found.append(f"{made.get('max_turns', 50)} turns ({turns})")
    for name, value in wanted.items():
        if name in SAME:
            continue
        # None takes the default, as gym.make does
        given = made.get(name, defaults.get(name))
        given = defaults.get(name) if given is None and name == "on_invalid" else given
        if given != value:
            found.append(f"{name} {given} ({value})")
    known = {*wanted, *SAME, *TASKS}
    known |= {name for name, value in made.items() if name in defaults and value == defaults[name]}
    return found + [f"{name} {brief(value, 40)}" for name, value in sorted(made.items()) if name not in known]


def _retrieval(made: Mapping[str, Any]) -> list[str]:
    retriever, rerank = made.get("retriever"), made.get("rerank")
    found = ["reranked passages"] if rerank is not None else []
    if retriever is None:
        return [*found, "BM25 over the questions' own passages (E5 over wiki-18)"]
    return [*found, f"retriever {excerpt(retriever, 60)}, of which it is not known whether it is E5 over wiki-18"]


def _chat(preset: Preset, played: Mapping[str, Any], channel: str | None) -> list[str]:
    """Settings of how a model is spoken to that are not the preset's."""
    own = preset.chat({"tool_name": preset.tool, "tool_argument": preset.argument})
    found = list[str]()
    if channel is not None and channel != preset.channel and not channel.startswith(f"{preset.channel}:"):
        found.append(f"channel {channel} ({preset.channel})")
    for name in CHAT:
        wanted, given = own.get(name), played.get(name)
        if name == "prompts" or given is None or given == wanted or (given == "auto" and wanted is None):
            continue
        if name == "system":
            found.append("another system message")
        else:
            found.append(f"{name} {given}" + (f" ({wanted})" if wanted is not None else ""))
    if played.get("examples") is not None and preset.name != "react":
        found.append("examples in the prompt")
    return found

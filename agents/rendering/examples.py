"""Examples in the prompt (few-shots): episodes of a trace or a text, in front of the task.

As turns, each episode of a trace stands in the prompt as earlier messages: observation, response, observation, ... As
text, it stands at the end of the system message, and so does the content of a text file. Turns may be shown by
category: in each task the examples of its own kind alone, as ReAct does in ALFWorld. `skills:FOLDER` is a folder of
texts by the kind of task (`skills.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from turngym.agents.rendering.memory import Example
from turngym.agents.rendering.renderer import said_in
from turngym.agents.rendering.skills import SKILLS_PREFIX, Skills, read_skills
from turngym.core.episode import Episode
from turngym.core.errors import AgentError
from turngym.core.task import Task, content_hash
from turngym.core.tools import Tools
from turngym.core.trace import read_episodes
from turngym.core.user_files import read_text, user_path
from turngym.envs.channels import Channel

ExamplesForm = Literal["auto", "text", "turns"]
ExamplesFor = Literal["all", "category"]
TRACE = ".jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """What a prompt shows in front of the task: a text in the system message, or episodes as messages."""

    text: str = ""
    episodes: tuple[Example, ...] = ()
    skills: Skills | None = None
    """Texts after the first observation."""
    tasks: tuple[Task, ...] = ()
    """The tasks of the examples, where they are known."""

    @property
    def identity(self) -> str | None:
        """A name and a hash of the content, for the record of a result; None without examples."""
        if self.skills is not None:
            return self.skills.identity
        if not self.text and not self.episodes:
            return None
        form = f"{len(self.episodes)} as turns" if self.episodes else "text"
        content = {"text": self.text, "episodes": [[*episode.turns, episode.final] for episode in self.episodes]}
        if categories := [episode.category for episode in self.episodes if episode.category]:
            form, content = f"{form} by category", content | {"categories": categories}
        return f"{form}, {content_hash(content)[:16]}"

    def in_system(self, system: str) -> str:
        """The system message with the text of the examples."""
        return f"{system}\n\n{self.text}".strip() if self.text else system


def read_examples(
    path: str | Path,
    form: ExamplesForm,
    env_id: str,
    channel: Channel,
    tool: Tools,
    shown_for: ExamplesFor = "all",
) -> Examples:
    """The examples in a trace (`*.jsonl`; its successful episodes, in order) or in a text file.

    `skills:FOLDER` stands for a folder of skills.

    Raises AgentError for a file that cannot be read or holds no example, for episodes of another environment, and for
    text by category.

    Args:
        form: `auto` shows a trace as turns and a text as text.
        channel: how the agent's responses carry actions. Responses of a trace that it does not read are rewritten.
        shown_for: the tasks that are shown an episode: `all`, or those of its own `category`.
    """
    if str(path).startswith(SKILLS_PREFIX):
        if form != "auto" or shown_for != "all":
            raise AgentError(f"--examples {path}: skills have a form of their own; leave out --form and --shown-for")
        return Examples(skills=read_skills(str(path).removeprefix(SKILLS_PREFIX)))
    path = user_path(path)
    if shown_for == "category" and (form == "text" or path.suffix != TRACE):
        raise AgentError(f"--examples {path}: only the episodes of a trace ({TRACE}), as turns, are shown by category")
    if path.suffix != TRACE:
        if form == "turns":
            raise AgentError(f"--examples {path}: only the episodes of a trace ({TRACE}) can be shown as turns")
        text = read_text(path, AgentError).strip()
        if not text:
            raise AgentError(f"--examples {path} is empty")
        return Examples(text=text)
    episodes = read_episodes(path)
    if foreign := sorted({episode.task.env_id for episode in episodes} - {env_id}):
        raise AgentError(f"--examples {path} has episodes of {', '.join(foreign)}; the agent plays {env_id}")
    tasks = tuple(episode.task for episode in episodes if episode.success)
    examples = tuple(_example(episode, channel, tool, shown_for) for episode in episodes if episode.success)
    if not examples:
        raise AgentError(f"--examples {path}: none of its {len(episodes)} episodes succeeded")
    if form != "text":
        return Examples(episodes=examples, tasks=tasks)
    text = "\n\n".join(f"Example {number}:\n{example.text}" for number, example in enumerate(examples, start=1))
    return Examples(text=text, tasks=tasks)


def _example(episode: Episode, channel: Channel, tool: Tools, shown_for: ExamplesFor) -> Example:
    valid = [turn for turn in episode.turns if turn.verdict.valid]
    turns = tuple((turn.observation, said_in(channel, tool, turn)) for turn in valid)
    category = episode.task.category if shown_for == "category" else ""
    return Example(turns=turns, final=episode.final_observation, category=category)

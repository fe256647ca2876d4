"""What `turngym panel export-prompts` writes: questions in Search-R1's form, or tasks of any environment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from turngym.agents.environments import env_maker, json_object
from turngym.agents.episode_runner import Job, begin
from turngym.envs.core import TurngymError
from turngym.envs.panels import Panel, load_panel
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.parquet import PROMPT, write_prompts
from turngym.trainers.adapters.prompts import prompt_row, write_prompt_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportPrompts:
    """Write the prompts of a panel's tasks, or of an environment's, as parquet that verl's trainers read."""

    panel: Annotated[str | None, tyro.conf.Positional] = None
    """Name, full name, or path of a manifest; without one the tasks of --env."""
    out: Path
    """The parquet file."""
    form: Literal["auto", "search-r1", "tasks"] = "auto"
    """`search-r1`: one message with instructions and question, as Search-R1 has it; `tasks`: what the environment says
    first, and the task for our agent loop. auto: search-r1 for panels of turngym/Search-v0, else tasks."""
    prompt: str = PROMPT
    """search-r1: the message, with {question} where the question goes; by default Search-R1's."""
    env: str | None = None
    """Gymnasium id, where no panel is named."""
    env_kwargs: str = "{}"
    """Arguments for gym.make as JSON, for example '{"split": "train"}'."""
    limit: int | None = None
    """Only the first so many tasks."""
    channel: Literal["text", "tool"] = "text"
    """tasks: how actions are to be written, as the system message says it."""
    seed: int = 0
    """tasks: seed of the rows; all samples of a task begin alike."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it."""


def export_prompts(command: ExportPrompts) -> int:
    """Write the file; the number of rows. Raises TurngymError for a form that the tasks do not have."""
    env, task_ids, hashes = _opened(command)
    task_ids = task_ids[: command.limit]
    try:
        questions = isinstance(env.unwrapped, SearchEnv)
        form = command.form if command.form != "auto" else "search-r1" if questions else "tasks"
        if form == "tasks":
            return write_prompt_rows(_rows(env, task_ids, hashes, command.seed), command.out)
        if not questions:
            raise TurngymError("--form search-r1: only questions of turngym/Search-v0 have it; use --form tasks")
        return write_prompts([env.unwrapped.source.questions[name] for name in task_ids], command.out, command.prompt)
    finally:
        env.close()


def _opened(command: ExportPrompts) -> tuple[Any, Sequence[str], dict[str, str]]:
    """The environment, its tasks, and what their hashes must be."""
    more: dict[str, Any] = {"channel": command.channel, **({} if command.data is None else {"data": command.data})}
    if command.panel is not None:
        if command.env is not None:
            raise TurngymError("export-prompts takes a panel or --env, not both")
        panel: Panel = load_panel(command.panel)
        return panel.make_env(**more), panel.task_ids, {task.task_id: task.sha256 for task in panel.tasks}
    if command.env is None:
        raise TurngymError("export-prompts needs a panel, or --env with the environment whose tasks are written")
    env: Any = env_maker(command.env, **{**json_object("--env-kwargs", command.env_kwargs), **more})()
    return env, env.unwrapped.task_ids(), {}


def _rows(env: Any, task_ids: Sequence[str], hashes: dict[str, str], seed: int) -> Iterator[dict[str, Any]]:
    """Each task begun as a rollout begins it, and what the policy reads then."""
    for index, task_id in enumerate(task_ids):
        job = Job(task_id=task_id, seed=seed, sha256=hashes.get(task_id, ""))
        said = begin(env, job, number=index, system=None, renderer=None).conversation
        yield prompt_row(said.task, said.system, said.observation, index=index, seed=seed)

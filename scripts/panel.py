"""List, show, verify and write task panels (versioned lists of hashed tasks).

Examples:
    turngym panel list
    turngym panel verify alfworld-valid-unseen --data ~/alfworld
    turngym panel export-prompts search-world-eval --out prompts.parquet
    turngym panel export-games alfworld-generated-unseen --out ~/generated_games
    turngym panel search-tests ~/data/test.parquet --out ~/search_tests
    turngym panel export-prompts --env turngym/WebShop-v0 --env-kwargs '{"split": "train"}' --out shop.parquet
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turngym.agents.adapters.croissant import write_croissant
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job, begin
from turngym.core.errors import TurngymError
from turngym.core.numbers import Count, Seed
from turngym.core.redaction import brief
from turngym.core.setting import Positional
from turngym.core.spec import Spec, Unread, needing
from turngym.core.strict_json import json_object
from turngym.core.task import plain_id
from turngym.core.user_files import must_be_new, must_end, read_text
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.alfworld.games import export_games
from turngym.envs.base import tasks_of
from turngym.envs.panels import (
    Panel,
    find_panel,
    installed_panels,
    list_panels,
    load_panel,
    panel_of_env,
    verify_panel,
    write_panel,
)
from turngym.envs.registration import make
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.sources import PROMPT, SETS, write_prompts
from turngym.envs.search.test_sets import write_test_sets
from turngym.scripts.options import run_verb
from turngym.trainers.adapters.datasets import prompt_row, write_prompt_rows


class ExportPrompts(Spec):
    """Write the prompts of a panel's tasks, or of an environment's, as parquet that verl's trainers read."""

    out: Path
    """The parquet file; must not exist."""
    panel: Positional[str | None] = None
    """Name, full name, or path of a manifest; without one the tasks of --env."""
    form: Literal["auto", "search-r1", "tasks"] = "auto"
    """`search-r1`: one message with instructions and question, as Search-R1 has it; `tasks`: what the environment says
    first, and the task for our agent loop. auto: search-r1 for panels of turngym/Search-v0, else tasks."""
    prompt: str = PROMPT
    """search-r1: the message, with {question} where the question goes; by default Search-R1's."""
    env: str | None = None
    """Gymnasium id, where no panel is named."""
    env_kwargs: str = "{}"
    """Arguments for gym.make as JSON, for example '{"split": "train"}'."""
    limit: Count | None = None
    """Only the first so many tasks."""
    channel: Literal["text", "tool"] = "text"
    """tasks: how actions are to be written, as the system message says it."""
    seed: Seed = 0
    """tasks: seed of the rows; all samples of a task begin alike."""
    data: Path | None = None
    """Folder of the data; by default where the environment looks for it."""

    def unread(self) -> Unread:
        if self.panel is not None:
            yield from needing("--env (a panel has its own)", "env_kwargs")
        if self.form == "tasks":
            yield from needing("--form search-r1", "prompt")
        if self.form == "search-r1":
            yield from needing("--form tasks", "channel", "seed")


def _export_prompts(command: ExportPrompts) -> int:
    """Writes the file. Raises TurngymError if the tasks do not have the form."""
    # the environment may be made of the very file: its arguments name it
    must_be_new(command.out, TurngymError)
    must_end(command.out, ".parquet")
    env, task_ids, hashes = _opened(command)
    task_ids = task_ids[: command.limit]
    try:
        asks = isinstance(env.unwrapped, SearchEnv)
        form = command.form if command.form != "auto" else "search-r1" if asks else "tasks"
        if form == "tasks":
            count = write_prompt_rows(_rows(env, task_ids, hashes, command.seed), command.out)
        elif asks:
            questions = [env.unwrapped.source.questions[task_id] for task_id in task_ids]
            count = write_prompts(questions, command.out, command.prompt)
        else:
            raise TurngymError("--form search-r1: only questions of turngym/Search-v0 have it; use --form tasks")
    finally:
        env.close()
    print(f"{count} prompts in {command.out}")
    return 0


def _opened(command: ExportPrompts) -> tuple[Any, Sequence[str], dict[str, str]]:
    """Opens the environment; returns it with its task ids and the expected hash of each task."""
    given = _data(command.data)
    if command.panel is not None:
        if command.env is not None:
            raise TurngymError("export-prompts takes a panel or --env, not both")
        panel = load_panel(command.panel)
        env: Any = panel.make_env(**given, channel=command.channel)
        return env, panel.task_ids, {task.task_id: task.sha256 for task in panel.tasks}
    if command.env is None:
        raise TurngymError("export-prompts needs a panel, or --env with the environment whose tasks are written")
    arguments = _arguments(command.env_kwargs, given)
    env = env_maker(command.env, **arguments, channel=command.channel)()
    return env, tasks_of(env.unwrapped), {}


def _arguments(env_kwargs: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `gym.make` in JSON, merged with `options`, which the command line has, too. Raises TurngymError for
    an argument in both, and for a channel, which belongs to the agent."""
    kwargs = json_object("--env-kwargs", env_kwargs)
    if "channel" in kwargs:
        raise TurngymError(f"--env-kwargs: channel is {brief(kwargs['channel'], 80)}; valid: --channel")
    for name in options.keys() & kwargs.keys():
        raise TurngymError(f"{name} is given by itself and among --env-kwargs; valid: once")
    return {**kwargs, **options}


def _rows(env: Any, task_ids: Sequence[str], hashes: dict[str, str], seed: int) -> Iterator[dict[str, Any]]:
    """Yields, for each task, the messages that a policy reads on its first turn."""
    for index, task_id in enumerate(task_ids):
        job = Job(task_id=task_id, seed=seed, sha256=hashes.get(task_id, ""))
        conversation = begin(env, job, number=index, system=None, renderer=None).conversation
        yield prompt_row(conversation.task, conversation.system, conversation.observation, index=index, seed=seed)


class SearchTests(Spec):
    """Write the seven test sets of Search-R1 as panels, from your files; the official counts are checked."""

    files: Positional[tuple[Path, ...]]
    """Search-R1's test.parquet, or a file for each set as FlashRAG has them (nq/test.jsonl, ...)."""
    out: Path
    """Folder for the panels and their question files: the --data with which they are played."""


_SHOWN_TASKS = 20
Name = Positional[str]


class List(Spec):
    """List the panels that come with turngym."""


class Show(Spec):
    """Print one panel: environment, categories, tasks."""

    panel: Name
    """Name (newest version), full name such as `alfworld-valid-unseen-v1`, or path of a manifest."""
    tasks: bool = False
    """Print every task with its hash."""


class Verify(Spec):
    """Recompute the hashes of a panel's tasks from your data and compare; status 1 if any differs."""

    panel: Name
    """Name, full name, or path of a manifest."""
    data: Path | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""


class Write(Spec):
    """Write a panel of an environment's tasks. An existing manifest with other content is never replaced."""

    name: Name
    """Name of the panel: lower-case letters, digits, hyphens."""
    env: str
    """Gymnasium id, for example `turngym/ALFWorld-v0` or `my_package:namespace/Name-v0`."""
    out: Path
    """Folder for the manifest."""
    version: Count = 1
    """Version of the panel; a change of content needs a new one."""
    env_kwargs: str = "{}"
    """Arguments for gym.make that belong to the panel, as JSON, for example '{"split": "valid_unseen"}'."""
    data: Path | None = None
    """Folder of the data; not written into the panel."""
    ids: Path | None = None
    """File with one task id per line; by default all tasks of the environment."""


class ExportGames(Spec):
    """Write generated ALFWorld games as the `game.tw-pddl` files that TextWorld and alfworld's own loader read."""

    out: Path
    """Folder for the games, as `alfworld-download` lays them out: json_2.1.1/SPLIT/TASK/TRIAL/game.tw-pddl."""
    panel: Positional[str | None] = None
    """Name, full name, or path of a manifest; without one the games of --env-kwargs."""
    env_kwargs: str = "{}"
    """Arguments of turngym/ALFWorld-v0 as JSON, where no panel is named, for example '{"config": "full"}'."""
    limit: Count | None = None
    """Only the first so many games."""

    def unread(self) -> Unread:
        if self.panel is not None:
            yield from needing("the games of the environment (no panel)", "env_kwargs")


class Croissant(Spec):
    """Write panels as a data set with its description in Croissant, which dataset searches and mlcroissant read."""

    panels: Positional[tuple[str, ...]]
    """Names, full names, or paths of manifests."""
    out: Path
    """Folder for the manifests and croissant.json."""
    name: str
    """Name of the data set."""
    url: str
    """Address of its page."""
    license: str
    """License of the lists, as an SPDX id, for example MIT."""
    creator: str
    """Who made the panels."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym panel` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {
        List: _list,
        Show: _show,
        Verify: lambda command: verify(load_panel(command.panel), **_data(command.data)),
        Write: _write,
        ExportPrompts: _export_prompts,
        ExportGames: _export_games,
        SearchTests: _search_tests,
        Croissant: _croissant,
    }
    return run_verb(verbs, argv, prog="turngym panel", about=__doc__)


def _list(command: List) -> int:
    damaged = 0
    for name in [*list_panels(), *installed_panels()]:
        try:
            panel = find_panel(name)
        # one package's file; the others' panels are none the worse for it
        except TurngymError as error:
            damaged += 1
            print(f"{name}: {error}", file=sys.stderr)
            continue
        print(f"{name:<32} {len(panel.tasks):>5} tasks  {panel.env_id}  {panel.sha256[:12]}")
    return 1 if damaged else 0


def _show(command: Show) -> int:
    panel = find_panel(command.panel)
    print(f"{panel.full_name}\n  environment  {panel.env_id} {json.dumps(dict(panel.make_kwargs))}")
    print(f"  sha256       {panel.sha256}\n  tasks        {len(panel.tasks)}")
    for category, count in sorted(Counter(task.category for task in panel.tasks).items()):
        print(f"    {category:<12} {count}")
    if command.tasks:
        for task in panel.tasks:
            print(f"{task.sha256}  {task.category:<10} {task.task_id}")
    return 0


def verify(panel: Panel, **made: Any) -> int:
    """Compares the tasks with the user's data, and says what differs; status 1 if any does."""
    env = panel.make_env(**made)
    try:
        problems = verify_panel(panel, env)
    finally:
        env.close()
    if not problems:
        print(f"{panel.full_name}: all {len(panel.tasks)} tasks are the panel's, hash for hash")
        return 0
    print(f"{panel.full_name}: {len(problems)} of {len(panel.tasks)} tasks differ")
    print("\n".join(f"  {problem}" for problem in problems[:_SHOWN_TASKS]))
    if len(problems) > _SHOWN_TASKS:
        print(f"  and {len(problems) - _SHOWN_TASKS} more")
    return 1


def _write(command: Write) -> int:
    panel = panel_of_env(
        command.name,
        command.env,
        version=command.version,
        make_kwargs=_arguments(command.env_kwargs, {}),
        task_ids=None if command.ids is None else _lines(command.ids),
        **_data(command.data),
    )
    print(f"{len(panel.tasks)} tasks in {write_panel(panel, command.out)}")
    return 0


def _export_games(command: ExportGames) -> int:
    panel = None if command.panel is None else load_panel(command.panel)
    kwargs = json_object("--env-kwargs", command.env_kwargs)
    if panel is not None and plain_id(panel.env_id) != ALFWorldEnv.env_id:
        raise TurngymError(
            f"panel export-games {panel.full_name}: its tasks are of {panel.env_id}; games are exported of "
            f"{ALFWorldEnv.env_id}"
        )
    env = make(ALFWorldEnv.env_id, kwargs) if panel is None else panel.make_env()
    try:
        base: Any = env.unwrapped
        ids = tasks_of(base) if panel is None else panel.task_ids
        games = export_games(base.source, ids[: command.limit], command.out)
    finally:
        env.close()
    print(f"{len(games)} games in {command.out}, for example {games[0]}")
    return 0


def _search_tests(command: SearchTests) -> int:
    panels = write_test_sets(command.files, command.out)
    for panel in panels:
        print(f"{command.out / panel.full_name}.json: {len(panel.tasks):,} questions, the official number")
    written = {panel.name for panel in panels}
    if missing := [name for name in SETS if f"search-{name}-test" not in written]:
        print(f"not in these files: {', '.join(missing)}")
    return 0


def _croissant(command: Croissant) -> int:
    about = {"name": command.name, "url": command.url, "license": command.license, "creator": command.creator}
    print(write_croissant([find_panel(name) for name in command.panels], command.out, **about))
    return 0


def _lines(path: Path) -> list[str]:
    return [line.strip() for line in read_text(path, TurngymError).split("\n") if line.strip()]


def _data(data: Path | None) -> dict[str, Any]:
    return {} if data is None else {"data": data}

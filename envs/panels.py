"""Panels: versioned lists of hashed tasks, so that everyone who names a panel plays the same tasks.

A panel is a JSON manifest, `<name>-v<version>.json`, with the id, hash, split and category of every task and a hash of
the whole. Published panels never change; a change needs a new version. `verify_panel` compares the hashes with the
user's own data.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import msgspec
import numpy as np

from turngym.core.errors import EnvBackendError, TurngymError, did_you_mean
from turngym.core.files import locked_file
from turngym.core.plugin_values import checked_task, failures_of
from turngym.core.plugins import installed_folders, package_folder
from turngym.core.redaction import brief
from turngym.core.task import Task, content_hash, plain_id
from turngym.core.user_files import json_object, user_path
from turngym.core.whole_files import atomic_write
from turngym.envs.base import TextEnv, tasks_of
from turngym.envs.registration import NOT_GIVEN, make

PANEL_FOLDER = Path(__file__).parent / "panel_data"
_SCHEMA = 1
_MANIFEST_NAME = re.compile(r"(?P<name>[a-z0-9-]+)-v(?P<version>[1-9][0-9]*)\.json")


class PanelError(TurngymError):
    """A manifest does not exist, is damaged, or does not match the user's data."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """An ordered set of tasks of one environment. `sha256` covers all other fields."""

    name: str
    """Lower-case letters, digits and hyphens, for example `alfworld-valid-unseen`."""
    version: int
    """Version, from 1; any change of the content needs a new one."""
    env_id: str
    """Gymnasium id; with its module for an environment of another package, `my_package:namespace/Name-v0`."""
    make_kwargs: Mapping[str, Any]
    """Arguments of `gym.make` that the environment needs to know the tasks, for example the split."""
    tasks: tuple[Task, ...]
    sha256: str

    @property
    def full_name(self) -> str:
        return f"{self.name}-v{self.version}"

    @property
    def task_ids(self) -> tuple[str, ...]:
        return tuple(task.task_id for task in self.tasks)

    def make_env(self, **overrides: Any) -> gym.Env[str, str]:
        """Makes the panel's environment; `overrides` (`data=`, `channel=`, `max_turns=`) go to `gym.make`."""
        return make(self.env_id, {**self.make_kwargs, **overrides})


def make_panel(name: str, version: int, env_id: str, make_kwargs: Mapping[str, Any], tasks: Sequence[Task]) -> Panel:
    """Makes a panel with its hash.

    Raises PanelError for a bad name, no tasks, repeated tasks, or tasks of another environment.
    """
    _check_name(name, version)
    try:
        body = _body(name, version, env_id, make_kwargs, tasks)
        msgspec.convert({**body, "sha256": ""}, _Manifest)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        raise PanelError(f"panel {name}: {error}") from error
    _check_fields(name, env_id, make_kwargs, tasks)
    if not tasks:
        raise PanelError(f"panel {name}: there are no tasks")
    seen: set[str] = set()
    for task in tasks:
        if task.env_id != plain_id(env_id):
            raise PanelError(f"panel {name}: task {task.task_id!r} belongs to {task.env_id}, not to {env_id}")
        if task.task_id in seen:
            raise PanelError(f"panel {name}: task {task.task_id!r} is listed twice")
        seen.add(task.task_id)
    kwargs, rows, sha256 = dict(make_kwargs), tuple(tasks), content_hash(body)
    return Panel(name=name, version=version, env_id=env_id, make_kwargs=kwargs, tasks=rows, sha256=sha256)


def _check_fields(name: str, env_id: str, make_kwargs: Mapping[str, Any], tasks: Iterable[Task]) -> None:
    """Raises PanelError for values that are not a task's, or that a manifest cannot hold."""
    for argument in (*NOT_GIVEN, "channel"):
        if argument in make_kwargs:
            raise PanelError(f"panel {name}: make_kwargs has {argument}, which is no part of a task")
    fields = ("task_id", "sha256", "split", "category")
    values = [(f"{field} of a task", getattr(task, field)) for task in tasks for field in fields]
    for label, value in (("env_id", env_id), ("make_kwargs", dict(make_kwargs)), *values):
        try:
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
        # half a surrogate pair and numbers that are not finite are ValueErrors
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"panel {name}: {label} is {brief(value, 80)}"
            raise PanelError(f"{problem}, which JSON in UTF-8 cannot hold: {error}") from None


def _check_name(name: str, version: int) -> None:
    """Raises PanelError for a name that its file could not have, by which the panel must be found again."""
    if not _MANIFEST_NAME.fullmatch(f"{name}-v{version}.json"):
        raise PanelError(f"panel name {name!r} version {version!r}: use lower-case letters, digits, hyphens; from 1")


def panel_of_env(
    name: str,
    env_id: str,
    *,
    version: int = 1,
    make_kwargs: Mapping[str, Any] | None = None,
    task_ids: Iterable[str] | None = None,
    **private: Any,
) -> Panel:
    """Makes a panel of an environment's tasks, by default of all (`TextEnv.task_of` says what each is).

    Args:
        name: of the panel: lower-case letters, digits, hyphens.
        env_id: Gymnasium id; `my_package:namespace/Name-v0` for an environment that `my_package` registers.
        make_kwargs: arguments of `gym.make` that belong to the panel, for example `{"split": "eval"}`; None: none.
        task_ids: ids of its tasks, in the panel's order; None: all that the environment lists.
        private: further arguments that are not written into the panel, for example the folder of the data.
    """
    kwargs = dict(make_kwargs or {})
    # before all tasks are begun
    _check_name(name, version)
    if "data" in kwargs:
        raise PanelError(f"panel {name}: data is a folder of this machine; valid: data= beside make_kwargs (--data)")
    if servers := _servers(kwargs):
        raise PanelError(f"panel {name}: {servers[0]} is no part of a task; valid: {servers[0]}= beside make_kwargs")
    env = make(env_id, {**kwargs, **private})
    try:
        return make_panel(name, version, env_id, kwargs, collect_tasks(env, task_ids))
    finally:
        env.close()


def collect_tasks(env: gym.Env[Any, Any], task_ids: Iterable[str] | None = None) -> tuple[Task, ...]:
    """The tasks with these ids, by default all of the environment."""
    base = _text_env(env)
    return tuple(_task_of(base, task_id) for task_id in (tasks_of(base) if task_ids is None else task_ids))


def _task_of(env: TextEnv, task_id: str) -> Task:
    """The task as the environment has it. Raises EnvBackendError, in a line, where it fails to say or says none."""
    with failures_of(f"{type(env).__name__}.task_of({brief(task_id, 80)})", env, EnvBackendError):
        return checked_task(env.task_of(task_id))


def write_panel(panel: Panel, folder: str | Path | None = None) -> Path:
    """Writes the manifest as `<name>-v<version>.json`, whole or not at all.

    Raises PanelError if one with other content exists, or the file cannot be written.
    """
    path = Path(folder or PANEL_FOLDER) / f"{panel.full_name}.json"
    text = _to_text(panel)
    try:
        if not path.exists():
            # two processes that write the same panel would share a scratch file
            with locked_file(path):
                if not path.exists():
                    with atomic_write(path) as file:
                        file.write(text)
        if path.read_bytes() != text.encode("utf-8"):
            raise PanelError(f"{path} exists with other content; published panels never change: use a new version")
    except OSError as error:
        raise PanelError(f"{path} cannot be written: {error.strerror}; nothing half-written was kept") from error
    return path


def list_panels(folder: str | Path | None = None) -> list[str]:
    """Full names (`alfworld-valid-unseen-v1`) of the manifests in `folder` (by default the shipped ones), sorted."""
    paths = Path(folder or PANEL_FOLDER).glob("*.json")
    matches = [match for match in (_MANIFEST_NAME.fullmatch(path.name) for path in paths) if match]
    order = sorted((match["name"], int(match["version"])) for match in matches)
    return [f"{name}-v{version}" for name, version in order]


def installed_panels() -> list[str]:
    """Names (`my_package:name-v1`) of the panels of other packages that are installed (group `turngym.packages`)."""
    folders = installed_folders().items()
    return [f"{package}:{name}" for package, folder in folders for name in list_panels(folder / "panel_data")]


def load_panel(name: str, folder: str | Path | None = None) -> Panel:
    """Loads a panel by name (newest version), by full name, or by the path of a manifest, and checks its hash.

    `my_package:name` is a panel of another package, which keeps its manifests in its folder `panel_data`. A manifest
    may come from anyone: `my_package:PATH.json` says that its environment may be imported from `my_package`.

    Raises PanelError for a manifest that names code or a server that its reader has not named.
    """
    panel = find_panel(name, folder)
    package, path = _manifest(name)
    module = panel.env_id.rpartition(":")[0]
    if path is None:
        return panel
    if servers := _servers(panel.make_kwargs):
        raise PanelError(
            f"{path}: make_kwargs has {servers[0]}, which is never taken from a manifest: a panel without it is played "
            f"with --env-kwargs '{{\"{servers[0]}\": ...}}'"
        )
    top = module.partition(".")[0]
    if module and top != package.partition(".")[0] and module not in sys.modules:
        raise PanelError(
            f"{path} is a panel of {panel.env_id}, whose code is not imported because a file names it; if you know it, "
            f"name it, too: {top}:{path}"
        )
    return panel


def find_panel(name: str, folder: str | Path | None = None) -> Panel:
    """Reads a panel as `load_panel` does, to be looked at: it may be of an environment that nobody has named."""
    _, path = _manifest(name)
    if path is not None:
        return _read(path)
    package, colon, name = name.rpartition(":")
    if colon:
        # where another package keeps its manifests
        if (home := package_folder(package)) is None:
            raise PanelError(
                f"there is no package {package!r} to take a panel from; install it, or name a manifest's path"
            )
        folder = home / "panel_data"
    folder = Path(folder or PANEL_FOLDER)
    names = list_panels(folder)
    # sorted by number, not as text: v10 is newer than v9
    for full_name in reversed(names):
        if name in (full_name, full_name.rpartition("-v")[0]):
            return _read(folder / f"{full_name}.json")
    if not colon and folder == PANEL_FOLDER:
        names += installed_panels()
    raise PanelError(
        f"there is no panel {name!r}; panels are: {', '.join(names) or 'none'}.{did_you_mean(name, names)}"
    )


def _manifest(name: str) -> tuple[str, Path | None]:
    """The package and the path that `PACKAGE:PATH.json` or `PATH.json` names; the path is None for another name."""
    if not name.endswith(".json"):
        return "", None
    package, colon, rest = name.partition(":")
    if colon and package.replace(".", "").isidentifier() and not user_path(name).exists():
        return package, user_path(rest)
    return "", user_path(name)


def _servers(make_kwargs: Mapping[str, Any]) -> list[str]:
    """The arguments that name a server to be asked during play: the retriever, and every address."""
    return [name for name, value in make_kwargs.items() if name in SEARCHES or "://" in json.dumps(value)]


SEARCHES = ("retriever", "rerank")
"""Arguments that name a server, or a model of the hub. They are no part of a task."""


def shipped_panel(name: str) -> Panel:
    """Loads a panel that a file names: one that comes with turngym, by its full name. Nothing else is read or imported.

    Raises PanelError for any other name.
    """
    if name not in list_panels():
        raise PanelError(
            f"a file names the panel {brief(name, 200)}, which does not come with turngym: name it yourself, with "
            "--panel, by its package (my_package:name) or the path of its manifest"
        )
    return _read(PANEL_FOLDER / f"{name}.json")


def verify_panel(panel: Panel, env: gym.Env[Any, Any]) -> list[str]:
    """Compares every task with the environment's own. Returns what differs, one line each; empty if all are equal."""
    base = _text_env(env)
    if base.env_id != plain_id(panel.env_id):
        return [f"the panel is for {panel.env_id}, the environment is {base.env_id}"]
    problems: list[str] = []
    for task in panel.tasks:
        try:
            current = _task_of(base, task.task_id)
        except TurngymError as error:
            problems.append(f"{task.task_id}: {error}")
            continue
        for field in ("sha256", "split", "category"):
            wanted, actual = getattr(task, field), getattr(current, field)
            if wanted != actual:
                problems.append(f"{task.task_id}: {field} is {actual}, the panel says {wanted}")
    return problems


def assert_disjoint(train: Iterable[Task], evaluation: Iterable[Task]) -> None:
    """Raises PanelError if a task is in both, by id or by content; the error names the first few."""
    by_id, by_hash = {}, {}
    for task in train:
        by_id[task.env_id, task.task_id] = task
        by_hash[task.sha256] = task
    shared = []
    for task in evaluation:
        twin = by_id.get((task.env_id, task.task_id)) or by_hash.get(task.sha256)
        if twin is not None:
            same = "" if twin.task_id == task.task_id else f" (in training as {twin.task_id})"
            shared.append(f"{task.task_id}{same}")
    if shared:
        others = f" and {len(shared) - 5} more" if len(shared) > 5 else ""
        raise PanelError(f"{len(shared)} evaluation tasks are also training tasks: {', '.join(shared[:5])}{others}")


def task_order(count: int, *, seed: int, step: int, batch: int) -> list[int]:
    """Which of `count` tasks training step `step` (1-based) takes, `batch` in all.

    The tasks are taken in a row from epoch after epoch. Every epoch is a permutation of its own, which (seed, epoch)
    fixes, so a resumed run needs no saved position.
    """
    positions = range((step - 1) * batch, step * batch)
    epochs = {position // count for position in positions}
    orders = {epoch: np.random.default_rng((seed, epoch)).permutation(count) for epoch in epochs}
    return [int(orders[position // count][position % count]) for position in positions]


def _text_env(env: gym.Env[Any, Any]) -> TextEnv:
    base = env.unwrapped
    if not isinstance(base, TextEnv):
        raise PanelError(f"panels need an environment that extends TextEnv, not {type(base).__name__}")
    return base


def _body(
    name: str, version: int, env_id: str, make_kwargs: Mapping[str, Any], tasks: Sequence[Task]
) -> dict[str, Any]:
    rows = [[task.task_id, task.sha256, task.split, task.category] for task in tasks]
    head = {"schema": _SCHEMA, "name": name, "version": version, "env_id": env_id, "make_kwargs": dict(make_kwargs)}
    return {**head, "tasks": rows}


def _to_text(panel: Panel) -> str:
    body = _body(panel.name, panel.version, panel.env_id, panel.make_kwargs, panel.tasks)
    # one task per line, so that a diff of two manifests shows which tasks changed
    rows = ",\n".join("  " + json.dumps(row, ensure_ascii=False) for row in body.pop("tasks"))
    head = "\n".join(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}," for key, value in body.items())
    return f'{{\n{head}\n "sha256": "{panel.sha256}",\n "tasks": [\n{rows}\n ]\n}}\n'


class _Manifest(msgspec.Struct):
    schema: Literal[1]
    name: str
    version: int
    env_id: str
    make_kwargs: dict[str, Any]
    sha256: str
    tasks: list[tuple[str, str, str, str]]
    """Id, hash, split and category of each."""


def _read(path: Path) -> Panel:
    if not path.is_file():
        raise PanelError(f"there is no panel manifest {path}")
    body = json_object(path, PanelError)
    try:
        manifest = msgspec.convert(body, _Manifest)
        tasks = [
            Task(env_id=plain_id(manifest.env_id), task_id=task_id, sha256=sha256, split=split, category=category)
            for task_id, sha256, split, category in manifest.tasks
        ]
        panel = make_panel(manifest.name, manifest.version, manifest.env_id, manifest.make_kwargs, tasks)
    except (msgspec.ValidationError, ValueError, PanelError) as error:
        raise PanelError(f"{path} is not a panel manifest: {error}") from error
    if panel.sha256 != manifest.sha256:
        raise PanelError(
            f"{path}: the content has sha256 {panel.sha256}, the manifest promises {brief(manifest.sha256, 80)}; it "
            "was changed"
        )
    return panel

"""The 30 tasks of ScienceWorld, the published split of their variations, and the hash of a variation.

    python -m turngym_scienceworld.tasks FOLDER     # writes the panels

Nothing here starts the simulator: all 7,204 variations are listed and hashed in a second.
"""

from __future__ import annotations

import sys
from functools import cache
from hashlib import file_digest
from pathlib import Path

from scienceworld.constants import JAR_PATH

from turngym.core import Task, TaskError, content_hash
from turngym.envs import make_panel, write_panel

ENV_ID = "scienceworld/ScienceWorld-v0"
VARIATIONS = {
    "boil": 30,
    "change-the-state-of-matter-of": 30,
    "chemistry-mix": 32,
    "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36,
    "find-animal": 300,
    "find-living-thing": 300,
    "find-non-living-thing": 300,
    "find-plant": 300,
    "freeze": 30,
    "grow-fruit": 126,
    "grow-plant": 126,
    "identify-life-stages-1": 14,
    "identify-life-stages-2": 10,
    "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386,
    "inclined-plane-friction-unnamed-surfaces": 162,
    "lifespan-longest-lived": 125,
    "lifespan-longest-lived-then-shortest-lived": 125,
    "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436,
    "measure-melting-point-unknown-substance": 300,
    "melt": 30,
    "mendelian-genetics-known-plant": 120,
    "mendelian-genetics-unknown-plant": 480,
    "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20,
    "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600,
    "use-thermometer": 540,
}
"""Variations of every task, as the jar counts them."""
SPLITS = ("train", "dev", "test")
SIMPLIFICATIONS = (
    "easy",
    "teleportAction",
    "selfWateringFlowerPots",
    "openContainers",
    "openDoors",
    "noElectricalAction",
)


def split_of(task: str, split: str) -> range:
    """The variations of a task in a split, as the simulator has them: a half, a quarter, and the rest."""
    quarter = VARIATIONS[task] // 4
    return {
        "train": range(2 * quarter),
        "dev": range(2 * quarter, 3 * quarter),
        "test": range(3 * quarter, VARIATIONS[task]),
    }[split]


def task_ids(split: str, most: int | None = None) -> list[str]:
    """Ids such as `boil/3` of a split, task by task; `most` of each task, None: all."""
    return [f"{task}/{number}" for task in VARIATIONS for number in split_of(task, split)[:most]]


@cache
def hash_of(jar: Path) -> str:
    """SHA-256 of the simulator. Raises TaskError where it cannot be read."""
    try:
        with jar.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise TaskError(f"{jar} cannot be read ({error.strerror}); data is the folder of scienceworld.jar") from None


def task_of(task_id: str, split: str, simplifications: str = "", jar: Path = Path(JAR_PATH)) -> Task:
    """The task with an id; its hash covers the simulator, the task, the variation and the simplifications."""
    task, _, number = task_id.partition("/")
    fixed = {"jar": hash_of(jar), "task": task, "variation": int(number), "simplifications": simplifications}
    return Task(env_id=ENV_ID, task_id=task_id, sha256=content_hash(fixed), split=split, category=task)


def write_panels(folder: str | Path) -> None:
    """Writes the published dev and test splits, and ten test variations of every task, as panels into `folder`."""
    for name, split, most in (("dev", "dev", None), ("test", "test", None), ("test-ten", "test", 10)):
        tasks = [task_of(task_id, split) for task_id in task_ids(split, most)]
        env_id = f"turngym_scienceworld:{ENV_ID}"
        write_panel(make_panel(f"scienceworld-{name}", 1, env_id, {"split": split}, tasks), folder)


if __name__ == "__main__":
    write_panels(sys.argv[1])

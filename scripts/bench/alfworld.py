"""Native ALFWorld engine against TextWorld: CPU time per step and reset, steps per second, memory, differential test.

Both engines play the same games with the same commands in this process; times are CPU seconds. TextWorld runs with
alfworld's wrappers in one environment that is given other games. Without real games the generator's `full` houses are
played; without the extra `turngym[alfworld]` the parts that need TextWorld are left out, and the output says so.

Examples:
    turngym bench alfworld
    turngym bench alfworld --data ~/alfworld --differential 324 --log differential.jsonl
"""

from __future__ import annotations

import json
import os
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import tyro
from gymnasium.wrappers import RecordEpisodeStatistics, TimeLimit

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.envs.alfworld.engine import NativeEngine
from turngym.envs.alfworld.env import open_split
from turngym.envs.alfworld.game import SPLITS, VARIABLE, Game
from turngym.envs.alfworld.games import GameSource
from turngym.envs.alfworld.reference.differential import Play, plan, run, summary
from turngym.envs.alfworld.reference.probes import anything
from turngym.envs.alfworld.textworld import Reference
from turngym.envs.core.errors import TaskError, TurngymError
from turngym.envs.guard import guard_of

STEP_TARGET, RESET_TARGET, RATE_TARGET, GROWTH_TARGET = 2000, 500, 5000, 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlfworldBench:
    """What to measure."""

    data: str | None = None
    """Folder of the real games; by default $ALFWORLD_DATA. Neither: generated games."""
    games: int = 12
    """Games that both engines play, spread over the six task types; 0 leaves this part out."""
    steps: int = 12
    """Commands per game: possible, impossible and malformed ones."""
    passes: int = 20
    """How often the native engine repeats what TextWorld plays once, for a steadier time."""
    rate_steps: int = 50_000
    """Random steps through gym.make with all wrappers; 0 leaves this part out."""
    episodes: int = 10_000
    """Episodes during which memory is watched (the full check is 100,000); 0 leaves this part out."""
    differential: int = 0
    """Games of the differential test (the full check is 300 or more; about 5 CPU seconds a game)."""
    log: Path | None = None
    """JSON lines of the differential test; games that are there already are not played again."""
    part: tuple[int, int] = (0, 1)
    """Play only every N-th game of the differential test, from the K-th: `--part K N`, for N processes with one log."""
    seed: int = 0


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; status 1 if a target is missed or the engines differ."""
    config = tyro.cli(AlfworldBench, args=list(argv), prog="turngym bench alfworld", description=__doc__)
    sources = open_sources(config.data)
    real = "generated" not in sources
    print(f"games: {', '.join(f'{len(s.task_ids)} {name}' for name, s in sources.items())}", flush=True)
    results: list[bool] = []
    reference = open_reference()
    if config.games and reference is not None:
        results += against_textworld(config, sources, reference)
    if config.rate_steps:
        results.append(throughput(config, "valid_unseen" if real and "valid_unseen" in sources else None))
    if config.episodes:
        results.append(memory(config, next(iter(sources)) if real else None))
    if config.differential and reference is not None:
        results.append(differential(config, sources))
    return 0 if all(results) else 1


def open_sources(data: str | None) -> dict[str, GameSource]:
    """Every split that is there; the generated `full` games if none is."""
    if data is None and not os.environ.get(VARIABLE):
        print(f"no real games (set {VARIABLE} or pass --data): playing generated ones")
        return {"generated": open_split("generated", config="full")}
    found: dict[str, GameSource] = {}
    missing: TaskError | None = None
    for split in SPLITS:
        try:
            found[split] = open_split(split, data=data)
        except TaskError as error:
            missing = error
    if not found and missing is not None:
        raise missing
    return found


def open_reference() -> Reference | None:
    """TextWorld, or None with a line that says why not."""
    try:
        return Reference()
    except TurngymError as error:
        print(f"left out, all that needs TextWorld: {error}")
        return None


def by_category(sources: dict[str, GameSource], most: int) -> dict[str, list[str]]:
    """Task ids by category; only the first `most` generated ones, because those must be made to know their category."""
    ids: dict[str, list[str]] = {}
    for name, source in sources.items():
        for task_id in source.task_ids[:most] if name == "generated" else source.task_ids:
            ids.setdefault(source.category(task_id) or "?", []).append(task_id)
    return ids


def loader(sources: dict[str, GameSource]) -> Any:
    """`task_id -> game content`, whichever split it is of."""
    return lambda task_id: sources[task_id.split("/")[0]].data(task_id)


def against_textworld(config: AlfworldBench, sources: dict[str, GameSource], reference: Reference) -> list[bool]:
    """CPU time of loading, resetting and stepping the same games with the same commands."""
    load = loader(sources)
    plays = plan(by_category(sources, 200), config.games, config.steps, load, config.seed)
    data = [load(play.task_id) for play in plays]
    commands = [draw_commands(game, play) for game, play in zip(data, plays, strict=True)]
    native = np.array([play_native(data, commands) for _ in range(config.passes)]).mean(axis=0)
    textworld = np.zeros(3)
    for number, (game, lines) in enumerate(zip(data, commands, strict=True)):
        textworld += play_textworld(reference, game, lines)
        print(f"  TextWorld: {number + 1} of {len(data)} games", end="\r", flush=True)
    games, steps = len(data), sum(map(len, commands))
    counts = np.array([games, games, steps])
    print(f"native against TextWorld, {games} games, {steps} commands, CPU time each:")
    names = ("another game (load and reset)", "reset of the same game", "step (admissible list included)")
    ratios = textworld / native
    targets = (RESET_TARGET, RESET_TARGET, STEP_TARGET)
    for name, a, b, ratio, target in zip(names, native / counts, textworld / counts, ratios, targets, strict=True):
        verdict(f"{name}: {a * 1e6:,.1f} us against {b * 1e3:,.1f} ms", ratio, target, "x")
    return [bool(ratio >= target) for ratio, target in zip(ratios, targets, strict=True)]


def draw_commands(data: Any, play: Play) -> list[str]:
    """The commands of one game, drawn by playing it natively."""
    engine = NativeEngine(Game(data, source=play.task_id))
    rng = np.random.default_rng(play.seed)
    commands = []
    for _ in range(play.steps):
        commands.append(anything(engine, rng))
        if engine.step(commands[-1])[1]:
            break
    return commands


def play_native(data: list[Any], commands: list[list[str]]) -> tuple[float, float, float]:
    """CPU seconds for loading and resetting, for resetting again, and for all steps."""
    clock = time.process_time
    start = clock()
    engines = [NativeEngine(Game(game)) for game in data]
    for engine in engines:
        engine.reset()
    loaded = clock()
    for engine in engines:
        engine.reset()
    reset = clock()
    for engine, lines in zip(engines, commands, strict=True):
        for line in lines:
            engine.step(line)
            engine.admissible()
    return loaded - start, reset - loaded, clock() - reset


def play_textworld(reference: Reference, data: Any, commands: list[str]) -> tuple[float, float, float]:
    """The same for one game in TextWorld."""
    clock = time.process_time
    start = clock()
    reference.load(data)
    reference.reset()
    loaded = clock()
    reference.reset()
    reset = clock()
    for line in commands:
        reference.step(line)
        reference.admissible()
    return loaded - start, reset - loaded, clock() - reset


def make_env(config: AlfworldBench, split: str | None) -> gym.Env[str, str]:
    """gym.make with the guard, TimeLimit and RecordEpisodeStatistics."""
    options: dict[str, Any] = {"split": split, "data": config.data} if split else {"config": "full"}
    env = gym.make("turngym/ALFWorld-v0", **options)
    return RecordEpisodeStatistics(TimeLimit(env, max_episode_steps=50))


def throughput(config: AlfworldBench, split: str | None) -> bool:
    """Random admissible steps per CPU second through gym.make with all wrappers, resets to drawn games included."""
    env = make_env(config, split)
    rng = np.random.default_rng(config.seed)
    draws = rng.random(config.rate_steps)
    _, info = env.reset(seed=config.seed)
    start = time.process_time()
    for draw in draws:
        actions = info["admissible_actions"]
        _, _, terminated, truncated, info = env.step(actions[int(draw * len(actions))])
        if terminated or truncated:
            _, info = env.reset()
    rate = config.rate_steps / (time.process_time() - start)
    return verdict(f"gym.make with all wrappers ({split or 'generated'}), one core", rate, RATE_TARGET, " steps/s")


def memory(config: AlfworldBench, split: str | None) -> bool:
    """Resident memory while episodes of two random steps are played on drawn games, from when the caches are full."""
    env = make_env(config, split)
    rng = np.random.default_rng(config.seed)
    count = len(guard_of(env).task_ids())
    # Caches (parsed games, hashes of tasks) fill up first; what grows after that would grow for ever.
    warm = max(config.episodes // 10, min(2 * count, config.episodes // 2))
    marks = {warm: "start", (warm + config.episodes) // 2: "middle", config.episodes: "end"}
    seen: dict[str, float] = {}
    _, info = env.reset(seed=config.seed)
    for episode in range(1, config.episodes + 1):
        for _ in range(2):
            actions = info["admissible_actions"]
            info = env.step(actions[int(rng.integers(len(actions)))])[4]
        _, info = env.reset()
        if episode in marks:
            seen[marks[episode]] = resident_mb()
    line = ", ".join(f"{name} {value:.1f}" for name, value in seen.items())
    # Up to the middle the allocator still settles, the more so after TextWorld; a leak shows afterwards, too.
    growth = seen["end"] - seen["middle"]
    flat = growth <= GROWTH_TARGET
    print(f"memory over {config.episodes:,} episodes, {count:,} games, start after {warm:,}: MB resident {line}")
    print(f"  growth from the middle to the end {growth:+.1f} MB (at most {GROWTH_TARGET} MB: {_word(flat)})")
    return flat


def resident_mb() -> float:
    """Resident memory of this process, MB (its peak where the system does not say)."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e6 if platform.system() == "Darwin" else peak * 1.024e-3


def differential(config: AlfworldBench, sources: dict[str, GameSource]) -> bool:
    """Play games in both engines and compare every byte."""
    load = loader(sources)
    first, every = config.part
    plays = plan(by_category(sources, 600), config.differential, 14, load, config.seed)[first::every]
    rows = run(plays, load, config.log, lambda _, n: print(f"  differential: {n + 1} of {len(plays)}", end="\r"))
    found = summary(rows)
    print(f"differential test: {json.dumps(found, indent=1)}")
    return int(found["mismatches"]) == 0


def verdict(text: str, value: float, target: float, unit: str) -> bool:
    """Print a measured value beside its target."""
    print(f"  {text}: {value:,.0f}{unit} (target {target:,}{unit}: {_word(value >= target)})", flush=True)
    return value >= target


def _word(met: bool) -> str:
    return "met" if met else "MISSED"

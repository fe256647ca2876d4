"""Breaks things on purpose and counts what goes wrong: bits, kills, second starts, actions, requests, other servers.

Examples:
    python tests/bench/faults.py
    python tests/bench/faults.py --only files actions --flips 200 --actions 20000 --seed 7
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import gymnasium as gym
import numpy as np
from tally import Tally, cpu_spent, fault_table

from turngym.core.spec import Spec
from turngym.core.tables import markdown
from turngym.core.task import Verdict
from turngym.scripts.options import read_options

Part = Literal["files", "actions", "outside", "kills", "soak", "twice", "servers"]


class Options(Spec):
    """How often each fault is tried. The defaults take a few minutes of one core."""

    only: tuple[Part, ...] = get_args(Part)
    """The parts to run."""
    flips: int = 25
    """Flipped bits for each kind of file."""
    actions: int = 1500
    """Senseless actions for each environment."""
    outside: int = 1
    """Requests to each kind of hostile server by each client, and episodes of each kind of hostile environment."""
    kills: int = 2
    """Kills (SIGKILL) for each kind of work."""
    soak: int = 4
    """Kills among a trainer, a server and its client that work at the same time; then as many among a proxy that learns
    and its client."""
    twice: int = 2
    """Second starts for each kind of work."""
    requests: int = 200
    """Malformed requests for each server."""
    seed: int = 0
    """Seed of places, bits, actions and moments."""


def main(argv: Sequence[str]) -> int:
    """Runs the parts asked for and prints a table; the exit status is 1 if anything failed."""
    options = read_options(Options, argv, prog="python tests/bench/faults.py", about=__doc__)
    found = []
    for tally in run_parts(options):
        found.append(tally)
        said = [f"{tally.what}: {tally.failures} failures in {tally.tries} tries", *tally.notes]
        print("\n".join(said), file=sys.stderr, flush=True)
    print(markdown(fault_table(found)))
    print(f"{sum(one.failures for one in found)} failures in {sum(one.tries for one in found)} tries")
    return 1 if any(one.failures for one in found) else 0


def run_parts(options: Options) -> Iterator[Tally]:
    """Yields the tally of each kind of fault as soon as it is known, with the CPU time that it took."""
    with tempfile.TemporaryDirectory(prefix="turngym-faults-") as scratch:
        before = cpu_spent()
        for tally in _parts(options, Path(scratch)):
            now = cpu_spent()
            tally.seconds, before = now - before, now
            yield tally


def _parts(options: Options, scratch: Path) -> Iterator[Tally]:
    # each part is imported only if it is asked for: torch and the servers take seconds to import
    if "files" in options.only:
        from damaged_files import flip_all

        yield from flip_all(scratch / "files", options.flips, options.seed)
    if "actions" in options.only:
        yield from fuzz_all(options.actions, options.seed)
    if "outside" in options.only:
        # what misbehaves is shared with tests; workers import the environment by its name
        sys.path.append(str(Path(__file__).parents[1] / "support"))
        from outside_faults import hostile_answers, hostile_environments

        yield from hostile_answers(options.outside)
        yield from hostile_environments(options.outside)
    if "kills" in options.only:
        from killed_work import kills

        yield from kills(scratch / "kills", options.kills, options.seed)
    if "soak" in options.only:
        from killed_soak import learning_soak, soak

        yield from soak(scratch / "soak", options.soak, options.seed)
        yield from learning_soak(scratch / "soak", options.soak, options.seed)
    if "twice" in options.only:
        from killed_work import second_starts

        yield from second_starts(scratch / "twice", options.twice)
    if "servers" in options.only:
        from server_faults import run_server_faults

        yield from run_server_faults(options.requests, options.seed)


# --- Senseless actions in every environment

ENVIRONMENTS = {"turngym/ALFWorld-v0": {"config": "small"}, "turngym/WebShop-v0": {}, "turngym/Search-v0": {}}
"""Environment ids and their arguments; all play in generated worlds."""
BAD_ANSWERS = ("raised", "wrong answer")
FRAGMENTS = (
    *("", " ", "\n", "\t", "\x00", "\ud800", "\u202e", "\ufb00", "\u0130", "go to", "search[", "click[", "take"),
    *("1e999", "-1", "[", "]", "{}", "<", ">", "%s", "${x}", "../", "None", "<action>", "</action>", "<tool_call>"),
)
"""Pieces of actions, markup and Unicode that code which handles text may stumble over."""


def fuzz_all(actions: int, seed: int) -> Iterator[Tally]:
    """Plays `actions` senseless actions in each environment. None may raise, and each must get a verdict."""
    for number, (name, kwargs) in enumerate(ENVIRONMENTS.items()):
        yield fuzz(name, kwargs, actions, np.random.default_rng([seed, number]))


def fuzz(name: str, kwargs: dict[str, Any], actions: int, rng: np.random.Generator) -> Tally:
    """Plays `actions` senseless actions in one environment."""
    import turngym.envs  # noqa: F401 - registers the ids

    tally = Tally(what=f"senseless actions: {name}", bad=BAD_ANSWERS)
    env = gym.make(name, disable_env_checker=True, **kwargs)
    done, info = True, dict[str, Any]()
    try:
        for _ in range(actions):
            if done:
                _, info = env.reset(seed=int(rng.integers(2**31)))
            action = senseless(rng, info.get("admissible_actions") or ("look",))
            try:
                observation, reward, terminated, truncated, info = env.step(action)
            except Exception as error:  # that is what is looked for
                tally.count("raised", f"{action!r:.80}: {type(error).__name__}: {error}")
                done = True
                continue
            done = terminated or truncated
            whole = isinstance(observation, str) and math.isfinite(reward) and info["verdict"] in list(Verdict)
            outcome = Verdict(info["verdict"]).value if whole else "wrong answer"
            tally.count(outcome, f"{action!r:.80}: {observation!r:.80}")
    finally:
        env.close()
    return tally


def senseless(rng: np.random.Generator, possible: Any) -> str:
    """Draws one of four sorts: fragments of syntax, random characters, a damaged or a very long admissible action."""
    sort = int(rng.integers(4))
    if sort == 0:
        return "".join(FRAGMENTS[place] for place in rng.integers(len(FRAGMENTS), size=int(rng.integers(1, 8))))
    if sort == 1:
        return "".join(chr(code) for code in rng.integers(0x110000, size=int(rng.integers(1, 40))))
    action = str(possible[int(rng.integers(len(possible)))])
    if sort == 2 and action:
        place = int(rng.integers(len(action)))
        return action[:place] + FRAGMENTS[int(rng.integers(len(FRAGMENTS)))] + action[place + int(rng.integers(2)) :]
    return action * int(rng.integers(1, 2000))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

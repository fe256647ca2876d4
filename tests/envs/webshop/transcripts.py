"""Recorded episodes of the original shop, replayed here and compared letter by letter."""

from __future__ import annotations

import json
import lzma
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.envs.webshop.env import ShopSession
from turngym.envs.webshop.products import ShopDataError
from turngym.envs.webshop.shop import Shop, open_shop

_FILE = "transcripts.jsonl.xz"
_TYPE = ("r_type", "title_score")
"""Parts of a reward that depend on the noun tagger: r_type where another product than the goal's was bought."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What was compared. A mismatch names episode, step and field and shows both values."""

    part: str
    episodes: int = 0
    steps: int = 0
    purchases: int = 0
    goal_purchases: int = 0
    """Purchases of the goal's own product."""
    fields: int = 0
    mismatches: list[str] = field(default_factory=list)

    def check(self, where: str, here: Any, recorded: Any) -> None:
        """Count one field and note it where the two differ."""
        self.fields += 1
        if here != recorded:
            self.mismatches.append(f"{where}: here {here!r:.300}, recorded {recorded!r:.300}")

    def __str__(self) -> str:
        bought = f"{self.purchases} purchases ({self.goal_purchases} of the goal product)"
        counts = f"{self.episodes} episodes, {self.steps} steps, {bought}, {self.fields} fields"
        return f"{self.part}: {counts}, {len(self.mismatches)} mismatches"


def read_transcripts(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a file of transcripts, or of the file of that name in a folder."""
    file = Path(path)
    file = file / _FILE if file.is_dir() else file
    if not file.is_file():
        raise ShopDataError(f"there are no transcripts at {str(path)!r}; wanted: {_FILE} or its folder")
    with lzma.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def parity(data: str | os.PathLike[str], *, price_seed: int = 7) -> list[Comparison]:
    """Replay the transcripts in the folder `data` on the 1,000-product shop in the same folder."""
    shops = {
        human: open_shop(f"1k-{kind}", data, price_seed=price_seed)
        for human, kind in ((False, "synthetic"), (True, "human"))
    }
    try:
        return replay(data, shops.__getitem__)
    finally:
        for shop in shops.values():
            shop.close()


def replay(
    path: str | os.PathLike[str], shop_of: Callable[[bool], Shop], *, exact_tagger: bool = False
) -> list[Comparison]:
    """Play all transcripts; one comparison per part of the file.

    Args:
        shop_of: the shop with human goals (True) or synthetic ones (False), its prices drawn with the recorded seed.
        exact_tagger: the shop's tagger is the recorder's, so scores, `r_type` and `title_score` must agree for every
            purchase; without it the first two are compared where the goal product was bought, the other parts of the
            reward everywhere.
    """
    found: list[Comparison] = []
    session: ShopSession | None = None
    for line in read_transcripts(path):
        if line["kind"] == "head":
            shop = shop_of(bool(line["human_goals"]))
            session = ShopSession(shop, line["mode"])
            goals = "human" if line["human_goals"] else "synthetic"
            found.append(Comparison(part=f"{line['mode']}, {goals} goals"))
            found[-1].check("number of goals", len(shop.goals), line["n_goals"])
        else:
            assert session is not None, "the transcripts begin without a head line"
            _episode(session, line, found[-1], exact_tagger)
    return found


def _episode(session: ShopSession, line: dict[str, Any], seen: Comparison, exact_tagger: bool) -> None:
    name = f"episode {seen.episodes} (goal {line['goal']})"
    observation, _ = session.reset(line["goal"])
    seen.check(f"{name}, reset", observation, line["reset"][0])
    for number, (action, recorded, available, reward, done) in enumerate(line["steps"]):
        where = f"{name}, step {number} {action!r}"
        observation, earned, ended, _ = session.step(action)
        seen.check(f"{where}, done", ended, done)
        if available is not None:
            seen.check(f"{where}, available actions", session.get_available_actions(), available)
        bought = session.state.asin == session.goal.asin
        if not done or bought or exact_tagger:
            seen.check(f"{where}, observation", observation, recorded)
            seen.check(f"{where}, reward", earned, reward)
        else:
            seen.check(f"{where}, observation", _unscored(observation, earned), _unscored(recorded, reward))
        if done:
            seen.purchases += 1
            seen.goal_purchases += bought
    seen.steps += len(line["steps"])
    seen.episodes += 1
    if "verbose" in line:
        parts = session.verbose_info or {}
        # a purchase of the goal's own product has r_type 1.0 with any tagger: only its title score is left out
        skip = () if exact_tagger else _TYPE[session.state.asin == session.goal.asin :]
        for key in sorted({*parts, *line["verbose"]}.difference(skip)):
            seen.check(f"{name}, {key}", parts.get(key), line["verbose"].get(key))


def _unscored(observation: str, reward: float) -> tuple[str, bool]:
    """A last page without its score, and whether it showed that score."""
    for joint in (" [SEP] ", "\n"):
        before, found, after = observation.partition(f"(min 0.0, max 1.0){joint}{reward}{joint}")
        if found:
            return f"{before}...{after}", True
    return observation, False

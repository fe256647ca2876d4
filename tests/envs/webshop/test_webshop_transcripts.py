"""Every recorded episode of the original shop replays here letter by letter."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from shop_session import ShopSession

from turngym.envs.webshop.nouns import NounTagger
from turngym.envs.webshop.reward import Reward
from turngym.envs.webshop.shop import Shop, open_shop

_TYPE = ("r_type", "title_score")
"""Parts of a reward that depend on the noun tagger: r_type where another product than the goal's was bought."""


@dataclass(slots=True, kw_only=True)
class Comparison:
    """What was compared. A mismatch names episode, step and field and shows both values."""

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


def read_transcripts(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def replay(path: Path, shop_of: Callable[[bool], Shop], *, exact_tagger: bool = False) -> list[Comparison]:
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
            found.append(Comparison())
            found[-1].check("number of goals", len(shop.goals), line["n_goals"])
        else:
            assert session is not None, "the transcripts begin without a head line"
            _episode(session, line, found[-1], exact_tagger)
    return found


def _episode(session: ShopSession, line: dict[str, Any], seen: Comparison, exact_tagger: bool) -> None:
    name = f"episode {seen.episodes} (goal {line['goal']})"
    observation = session.reset(line["goal"])
    seen.check(f"{name}, reset", observation, line["reset"][0])
    for number, (action, recorded, available, reward, done) in enumerate(line["steps"]):
        where = f"{name}, step {number} {action!r}"
        observation, earned, ended = session.step(action)
        seen.check(f"{where}, done", ended, done)
        if available is not None:
            seen.check(f"{where}, available actions", session.available(), available)
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
        parts = {} if session.state.reward is None else _verbose(session.state.reward)
        # a purchase of the goal's own product has r_type 1.0 with any tagger: only its title score is left out
        skip = () if exact_tagger else _TYPE[session.state.asin == session.goal.asin :]
        for key in sorted({*parts, *line["verbose"]}.difference(skip)):
            seen.check(f"{name}, {key}", parts.get(key), line["verbose"].get(key))


def _verbose(reward: Reward) -> dict[str, Any]:
    """What the original's `verbose` gives: the option part only where options are wanted."""
    options = {"r_option", "w_option"} if reward.r_option is None else set()
    return {name: value for name, value in asdict(reward).items() if name not in {"total", "tagger", *options}}


def _unscored(observation: str, reward: float) -> tuple[str, bool]:
    """A last page without its score, and whether it showed that score."""
    for joint in (" [SEP] ", "\n"):
        before, found, after = observation.partition(f"(min 0.0, max 1.0){joint}{reward}{joint}")
        if found:
            return f"{before}...{after}", True
    return observation, False


def shops(data: Path, tagger: str | NounTagger | None = None) -> Callable[[bool], Shop]:
    @cache
    def shop_of(human: bool) -> Shop:
        return open_shop("1k-human" if human else "1k-synthetic", data, price_seed=7, tagger=tagger)

    return shop_of


@pytest.fixture
def file(webshop_data: Path) -> Path:
    return webshop_data / "transcripts.jsonl.xz"


def stand_in() -> NounTagger:
    """The tagger behind the transcripts: each token with a letter that is no stop word of spaCy's English."""
    nlp = pytest.importorskip("spacy", reason="the recorder's tokens are spaCy's: pip install 'turngym[spacy]'").blank(
        "en"
    )

    def nouns(title: str) -> tuple[str, ...]:
        tokens = (token for token in nlp(title) if any(map(str.isalpha, token.text)) and not token.is_stop)
        return tuple(token.text.lower() for token in tokens)

    return NounTagger(name="stand-in", nouns=nouns)


def test_all_episodes_replay(webshop_data: Path, file: Path) -> None:
    parts = replay(file, shops(webshop_data))
    assert [problem for part in parts for problem in part.mismatches] == []
    assert [(part.episodes, part.steps, part.purchases, part.goal_purchases) for part in parts] == [
        (40, 284, 35, 15),
        (10, 73, 7, 4),
        (6, 57, 3, 2),
    ]


def test_with_the_recorders_tagger_every_score_agrees(webshop_data: Path, file: Path) -> None:
    parts = replay(file, shops(webshop_data, stand_in()), exact_tagger=True)
    assert [problem for part in parts for problem in part.mismatches] == []
    assert sum(part.fields for part in parts) == 2116


def test_a_difference_is_found_and_named(webshop_data: Path, file: Path, tmp_path: Path) -> None:
    lines = read_transcripts(file)[:2]
    lines[1]["steps"][1][1] += "!"
    lines[1]["steps"][2][2]["clickables"].pop()
    lines[1]["steps"][3][4] = True
    path = tmp_path / "other.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(json.dumps(line) for line in lines).encode()))
    (part,) = replay(path, shops(webshop_data))
    assert len(part.mismatches) == 3
    for problem, what in zip(part.mismatches, ("observation", "available actions", "done"), strict=True):
        assert f", {what}: here " in problem
        assert problem.startswith("episode 0 (goal 4760), step ")

"""Every recorded episode of the original shop replays here without a difference."""

from __future__ import annotations

import json
import lzma
from functools import cache
from pathlib import Path

import pytest
from transcripts import parity, read_transcripts, replay

from turngym.envs.webshop.products import ShopDataError
from turngym.envs.webshop.reward import DEFAULT_TAGGER, NounTagger
from turngym.envs.webshop.shop import Shop, open_shop

PRICE_SEED = 7


def shops(data: Path, tagger: str | NounTagger):  # type: ignore[no-untyped-def]
    @cache
    def shop_of(human: bool) -> Shop:
        return open_shop("1k-human" if human else "1k-synthetic", data, price_seed=PRICE_SEED, tagger=tagger)

    return shop_of


def stand_in() -> NounTagger:
    """The tagger behind the transcripts: each token with a letter that is no stop word of spaCy's English."""
    nlp = pytest.importorskip("spacy", reason="the recorder's tokens are spaCy's: pip install 'turngym[spacy]'").blank(
        "en"
    )

    def nouns(title: str) -> tuple[str, ...]:
        tokens = (token for token in nlp(title) if any(map(str.isalpha, token.text)) and not token.is_stop)
        return tuple(token.text.lower() for token in tokens)

    return NounTagger(name="stand-in", nouns=nouns)


def test_all_episodes_replay(webshop_data: Path) -> None:
    parts = parity(webshop_data)
    for part in parts:
        print(part)
    assert [problem for part in parts for problem in part.mismatches] == []
    assert [(part.episodes, part.steps, part.purchases, part.goal_purchases) for part in parts] == [
        (40, 284, 35, 15),
        (10, 73, 7, 4),
        (6, 57, 3, 2),
    ]


def test_with_the_recorders_tagger_every_score_agrees(webshop_data: Path) -> None:
    parts = replay(webshop_data, shops(webshop_data, stand_in()), exact_tagger=True)
    for part in parts:
        print(part)
    assert [problem for part in parts for problem in part.mismatches] == []
    assert sum(part.fields for part in parts) == 2116


def test_a_difference_is_found_and_named(webshop_data: Path, tmp_path: Path) -> None:
    lines = list(read_transcripts(webshop_data))[:2]
    lines[1]["steps"][1][1] += "!"
    lines[1]["steps"][2][2]["clickables"].pop()
    lines[1]["steps"][3][4] = True
    path = tmp_path / "other.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(json.dumps(line) for line in lines).encode()))
    (part,) = replay(path, shops(webshop_data, DEFAULT_TAGGER))
    assert len(part.mismatches) == 3
    for problem, field in zip(part.mismatches, ("observation", "available actions", "done"), strict=True):
        assert f", {field}: here " in problem
        assert problem.startswith("episode 0 (goal 4760), step ")
    with pytest.raises(ShopDataError, match="there are no transcripts at"):
        next(read_transcripts(tmp_path))

"""Nouns of titles: the real tagger's without spaCy, kept for other shops, and a mark on every score without them."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turngym.agents import evaluate, play_episodes
from turngym.agents.adapters.panel_sessions import PanelSessions
from turngym.agents.evaluation.compare import compare_recorded
from turngym.agents.evaluation.packed import check_result, pack_result
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.evaluation.statistics import ScoreError
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ScriptedAgent
from turngym.envs.panels import Panel, panel_of_env, write_panel
from turngym.envs.registration import make_env
from turngym.envs.webshop import nouns, open_catalog
from turngym.envs.webshop.env import WebShopEnv
from turngym.envs.webshop.nouns import (
    SHIPPED,
    NounTable,
    find_tagger,
    make_tagger,
    record_nouns,
    title_key,
    write_table,
)
from turngym.envs.webshop.products import ShopDataError
from turngym.envs.webshop.shop import Shop, open_shop
from turngym.scripts.main import main

EXACT = "en_core_web_sm-3.8.0"


def digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]


# --- the original's 1,000 products


def first_hits(shop: Shop) -> list[float]:
    """The scores of buying the first hit for the instruction, of the 200 goals of the panel."""
    hits = ((goal, shop.search(goal.instruction_text.lower())[0]) for goal in shop.goals[:200])
    return [shop.reward(goal, asin, {}).total for goal, asin in hits]


def drawn_types(shop: Shop) -> list[list[float]]:
    """(r_type, title score) of 3,000 purchases drawn at random."""
    rng, found = random.Random(0), []
    for _ in range(3000):
        goal = shop.goals[rng.randrange(len(shop.goals))]
        reward = shop.reward(goal, shop.products[rng.randrange(1000)].asin, {})
        found.append([reward.r_type, reward.title_score])
    return found


def test_scores_are_the_real_taggers_without_spacy(webshop_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The digests are of the same purchases, scored with spaCy 3.8.18 and en_core_web_sm 3.8.0."""
    monkeypatch.setitem(sys.modules, "spacy", None)
    shop = open_shop("1k-synthetic", webshop_data)
    assert shop.scoring == {"scored_with": EXACT}
    assert digest([shop.tagger.nouns(product.title) for product in shop.products]) == "bea473efb7356713"
    scores = first_hits(shop)
    assert digest(scores) == "5d48cb7e8403384a"
    assert np.mean(scores) == pytest.approx(0.578424, abs=1e-6)
    assert digest(drawn_types(shop)) == "d2c147faa59b13f9"
    shop.close()
    builtin = open_shop("1k-synthetic", webshop_data, tagger="builtin")
    others = first_hits(builtin)
    assert np.mean(others) == pytest.approx(0.512868, abs=1e-6)
    assert sum(one != other for one, other in zip(scores, others, strict=True)) == 25
    assert "approximate" in builtin.scoring
    assert builtin.fingerprint != shop.fingerprint
    builtin.close()


@pytest.mark.parametrize(("profile", "most"), [("1k-synthetic", 64 << 20), ("1k-human", 0)])
def test_every_title_is_recorded(
    webshop_data: Path, tmp_path: Path, profile: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_catalog, "MAPPED_FROM", most)
    monkeypatch.setenv("TURNGYM_CACHE", str(tmp_path))
    shop = open_shop(profile, webshop_data)
    assert shop.tagger.exact
    assert len(NounTable(SHIPPED)) == len({product.title for product in shop.products}) == 1000
    # a goal's title is tagged as its product's is
    goal = shop.goals[0]
    found = shop.product(goal.asin)
    assert found is not None
    assert shop.tagger.nouns(goal.title) == shop.tagger.nouns(found.title) != ()
    shop.close()


# --- a shop of other products


class FakePipeline:
    """Words that end in a vowel are nouns. Counts the titles that it was asked, and can be killed."""

    asked: int = 0
    dies_at: int | None = None

    def __init__(self, model: str) -> None:
        self.name = {"sm": "en_core_web_sm-9.9.9", "lg": "en_core_web_lg-9.9.9"}.get(model, EXACT)

    def spans(self, titles: Iterable[str]) -> Iterator[np.ndarray]:
        for title in titles:
            if FakePipeline.asked == FakePipeline.dies_at:
                raise KeyboardInterrupt
            FakePipeline.asked += 1
            start, found = 0, []
            for word in title.split(" "):
                if word[-1:].lower() in tuple("aeiou"):
                    found.append((start, len(word)))
                start += len(word) + 1
            yield np.array(found, dtype=np.int64).reshape(-1, 2)


KINDS = ("Scarf", "Table", "Lampe", "Tie")


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 40 products, an empty cache, and a model to tag with."""
    monkeypatch.setattr(nouns, "Pipeline", FakePipeline)
    monkeypatch.setattr(FakePipeline, "asked", 0)
    monkeypatch.setattr(FakePipeline, "dies_at", None)
    monkeypatch.setenv("TURNGYM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "data"
    folder.mkdir()
    items = [
        {
            "asin": f"b{number:09d}",
            "name": f"{KINDS[number % 4]} thing {number} \U0001f9e3 Édition",
            "full_description": "",
            "small_description": ["soft"],
            "category": "fashion",
            "query": f"query {number}",
            "product_category": f"Clothing › Kind {number}",
            "pricing": "$12.50",
            "customization_options": "",
        }
        for number in range(40)
    ]
    wanted = {"attributes": ["soft"], "instruction": "i want a blue thing", "instruction_attributes": ["soft"]}
    for suffix in ("_1000", ""):
        (folder / f"items_shuffle{suffix}.json").write_text(json.dumps(items))
        (folder / f"items_ins_v2{suffix}.json").write_text(json.dumps({item["asin"]: wanted for item in items}))
    return folder


def test_a_shop_without_nouns_says_so_until_they_are_recorded(
    data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = open_shop("full-synthetic", data)
    why = "nouns of titles by builtin, not by en_core_web_sm: `turngym index nouns --profile full-synthetic`"
    assert shop.scoring == {"scored_with": "builtin", "approximate": why}
    before = [shop.reward(goal, shop.products[0].asin, {}).total for goal in shop.goals]
    shop.close()
    assert main(["index", "nouns", "--profile", "full-synthetic", "--data", str(data), "--model", "sm"]) == 0
    said = "the nouns of 40 titles by en_core_web_sm-9.9.9; results of full-synthetic are scored with them"
    assert said in capsys.readouterr().out
    shop = open_shop("full-synthetic", data)
    assert shop.scoring == {"scored_with": "en_core_web_sm-9.9.9"}
    assert shop.tagger.nouns("Table thing 1 \U0001f9e3 Édition") == ("table",)
    assert [shop.reward(goal, shop.products[0].asin, {}).total for goal in shop.goals] != before
    with pytest.raises(ShopDataError, match="do not have the title 'another'"):
        shop.tagger.nouns("another")
    shop.close()
    # however the shop is stored; the same products in another profile are the same shop
    for profile, most in (("full-synthetic", 0), ("1k-synthetic", 64 << 20)):
        monkeypatch.setattr(open_catalog, "MAPPED_FROM", most)
        other = open_shop(profile, data)
        assert other.scoring == {"scored_with": "en_core_web_sm-9.9.9"}
        other.close()
    # asked for, the list is what was asked for
    other = open_shop("full-synthetic", data, tagger="builtin")
    assert "approximate" in other.scoring
    other.close()
    assert FakePipeline.asked == 40


def test_a_shop_that_changed_is_not_scored_with_old_nouns(data: Path) -> None:
    record_nouns("full-synthetic", data, model="sm")
    path = data / "items_shuffle.json"
    path.write_text(path.read_text().replace("Table thing 1 ", "Tables thing 1 "))
    shop = open_shop("full-synthetic", data)
    assert "approximate" in shop.scoring
    shop.close()
    record_nouns("full-synthetic", data, model="sm")
    # the other 39 were known
    assert FakePipeline.asked == 41
    shop = open_shop("full-synthetic", data)
    assert shop.scoring == {"scored_with": "en_core_web_sm-9.9.9"}
    shop.close()


@pytest.mark.parametrize("part", [7])
@pytest.mark.parametrize("dies_at", [0, 13])
def test_after_a_kill_it_goes_on(data: Path, monkeypatch: pytest.MonkeyPatch, part: int, dies_at: int) -> None:
    monkeypatch.setattr(nouns, "PART", part)
    FakePipeline.dies_at = dies_at
    with pytest.raises(KeyboardInterrupt):
        record_nouns("full-synthetic", data, model="sm")
    shop = open_shop("full-synthetic", data)
    assert "approximate" in shop.scoring
    shop.close()
    FakePipeline.dies_at, FakePipeline.asked = None, 0
    table = record_nouns("full-synthetic", data, model="sm")
    assert FakePipeline.asked == 40 - dies_at // part * part
    (folder,) = (data.parent / "cache" / "webshop").glob("nouns-*")
    assert not list(folder.parent.glob("building-*"))
    again = FakePipeline("sm")
    for item in json.loads((data / "items_shuffle.json").read_text()):
        spans = table.spans(title_key(item["name"]))
        assert spans is not None
        assert spans.tolist() == next(again.spans([item["name"]])).tolist()


def test_what_is_known_is_not_asked_again(data: Path) -> None:
    first = record_nouns("full-synthetic", data, model="sm")
    assert (len(first), FakePipeline.asked) == (40, 40)
    record_nouns("full-synthetic", data, model="sm")
    assert FakePipeline.asked == 40
    # another model finds its own, and takes the place of the first
    assert record_nouns("full-synthetic", data, model="lg").name == "en_core_web_lg-9.9.9"
    assert FakePipeline.asked == 80
    shop = open_shop("full-synthetic", data)
    assert shop.scoring["scored_with"] == "en_core_web_lg-9.9.9"
    # which is not the original's
    assert "not by en_core_web_sm" in shop.scoring["approximate"]
    shop.close()


def test_turngyms_own_table_is_taken_over(webshop_data: Path, data: Path) -> None:
    table = record_nouns("1k-human", webshop_data, model="shipped")
    assert (len(table), FakePipeline.asked) == (1000, 0)
    assert np.array_equal(table.keys, NounTable(SHIPPED).keys)


def test_what_cannot_be_recorded(data: Path) -> None:
    with pytest.raises(ShopDataError, match="profile 'embedded' is generated"):
        record_nouns("embedded")
    assert main(["index", "nouns", "--profile", "full", "--data", str(data)]) == 2
    path = data / "items_shuffle.json"
    path.write_text(path.read_text().replace("Table thing 1 ", "Table thing 1 " + "x" * 70_000))
    with pytest.raises(ShopDataError, match=r"'b000000001' has a title of 70,0\d\d characters"):
        record_nouns("full-synthetic", data)


@pytest.mark.parametrize("file", ["manifest.json", "spans.npy"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_damaged_nouns_are_named(data: Path, file: str, damage: str) -> None:
    record_nouns("full-synthetic", data, model="sm")
    (folder,) = (data.parent / "cache" / "webshop").glob("nouns-*")
    path = folder / file
    if damage == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content[:-1] if damage == "cut" else content)
    if (file, damage) == ("manifest.json", "gone"):
        # as if they had not been recorded
        shop = open_shop("full-synthetic", data)
        assert "approximate" in shop.scoring
        shop.close()
        return
    with pytest.raises(ShopDataError, match=r"nouns-.* cannot be used: .*; delete"):
        open_shop("full-synthetic", data)
    shutil.rmtree(folder)
    record_nouns("full-synthetic", data, model="sm")
    open_shop("full-synthetic", data).close()


def test_a_table_of_no_titles(tmp_path: Path) -> None:
    write_table(tmp_path / "empty", "x-1", {})
    assert "any" not in NounTable(tmp_path / "empty")
    write_table(tmp_path / "one", "x-1", {title_key("of the"): b""})
    assert NounTable(tmp_path / "one").tagger().nouns("of the") == ()


# --- results


@pytest.fixture
def panel(data: Path) -> Panel:
    kwargs = {"profile": "full-synthetic", "split": "eval"}
    return panel_of_env("mine", "turngym/WebShop-v0", make_kwargs=kwargs, data=str(data))


def played(panel: Panel, data: Path, out: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"samples": 1, "progress": False, "workers": 0, "data": str(data), **options}
    return evaluate(panel, "first-hit", out=out, **settings)


def test_the_mark_is_in_table_title_and_identity_and_goes(panel: Panel, data: Path, tmp_path: Path) -> None:
    before = played(panel, data, tmp_path / "before")
    why = "nouns of titles by builtin, not by en_core_web_sm: `turngym index nouns --profile full-synthetic`"
    assert before.title.startswith("mine-v1, ")
    assert before.title.endswith(f", scores approximate ({why}): 1 sample")
    marked = {row[0]: row[1] for row in before.table()[1]}
    assert [marked[name][0] for name in ("fashion", "Avg@1 [95 %]", "pass@1 [95 %]", "score")] == ["~"] * 4
    written = json.loads((tmp_path / "before" / "results.json").read_text())
    scoring = written["spec"]["play"]["scoring"]
    assert scoring["scored_with"] == "builtin"
    assert scoring["approximate"] == written["scores"]["approximate"] == why
    assert before.episodes[0].meta["approximate"] == why
    record_nouns("full-synthetic", data, model="sm")
    # the same folder would mix two scorings
    with pytest.raises(EvaluationError, match="scored_with"):
        played(panel, data, tmp_path / "before")
    after = played(panel, data, tmp_path / "after")
    assert "approximate" not in after.title
    assert not any("~" in cell for row in after.table()[1] for cell in row)
    written = json.loads((tmp_path / "after" / "results.json").read_text())
    assert written["spec"]["play"]["scoring"] == {"scored_with": "en_core_web_sm-9.9.9"}
    assert after.scores.score != before.scores.score


def test_two_scorings_are_not_compared(
    panel: Panel, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played(panel, data, tmp_path / "a")
    record_nouns("full-synthetic", data, model="sm")
    played(panel, data, tmp_path / "b")
    with pytest.raises(ScoreError, match=r"scored_with 'builtin' and 'en_core_web_sm-9\.9\.9'"):
        compare_recorded(tmp_path / "a", tmp_path / "b")
    found = compare_recorded(tmp_path / "a", tmp_path / "b", different_settings=True)
    rows = found.table()[1]
    assert [cell[0] == "~" for cell in rows[-1][1:3]] == [True, False]
    assert found.notes()[0].startswith("~ is approximate: nouns of titles by builtin")
    assert main(["report", f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}", "--no-figure"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# a, b: mine-v1")
    assert "~ is approximate: nouns of titles by builtin" in text
    assert "Success: a ~" in text
    assert "scored_with | builtin | en_core_web_sm-9.9.9 |" in text
    assert "not compared, played otherwise: play.scoring.scored_with" in text


@pytest.mark.long
def test_packed_results_keep_it(panel: Panel, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_panel(panel, tmp_path / "panels"))
    where: dict[str, Any] = {"panel": path, "data": str(data)}
    results = tmp_path / "results"
    played(panel, data, tmp_path / "a")
    pack_result(tmp_path / "a", results / "a.result.xz", **where)
    assert check_result(results / "a.result.xz", **where) == []
    record_nouns("full-synthetic", data, model="sm")
    differences = check_result(results / "a.result.xz", **where)
    said = "settings: scored_with is 'builtin' in the file, 'en_core_web_sm-9.9.9' when it is played"
    assert said in differences
    played(panel, data, tmp_path / "b")
    pack_result(tmp_path / "b", results / "b.result.xz", **where)
    assert main(["result", "table", str(results), "--out", str(tmp_path / "table")]) == 0
    text = capsys.readouterr().out
    assert "## mine-v1, scores approximate (nouns of titles by builtin" in text
    assert "## mine-v1, scored with en_core_web_sm-9.9.9" in text
    assert "| a | ~" in text
    assert "| b | ~" not in text
    assert "en_core_web_sm-9.9.9" in (tmp_path / "table" / "results.csv").read_text()


def test_rollouts_and_other_evaluators_keep_it(panel: Panel, data: Path, tmp_path: Path) -> None:
    kwargs = {"profile": "full-synthetic", "split": "eval", "data": str(data)}
    trace = tmp_path / "t.jsonl"
    found = play_episodes(
        "turngym/WebShop-v0", "first-hit", tasks=2, env_kwargs=kwargs, progress=False, workers=0, out=trace
    )
    assert {episode.meta["scored_with"] for episode in found.episodes} == {"builtin"}
    assert "~" in str(found)
    # whoever plays, the episode says what scored it
    jobs = [Job(task_id=panel.task_ids[0])]
    (episode,) = rollout(jobs, lambda: make_env(WebShopEnv, **kwargs), ScriptedAgent("first-hit"))
    assert episode.meta["scored_with"] == "builtin"
    sessions = PanelSessions.of(panel, channel=None, data=str(data), trace=tmp_path / "sessions.jsonl")
    assert sessions.spec.play.scoring["scored_with"] == "builtin"
    sessions.pool.close()
    record_nouns("full-synthetic", data, model="sm")
    assert (
        PanelSessions.of(panel, channel=None, data=str(data)).spec.play.scoring["scored_with"] == "en_core_web_sm-9.9.9"
    )


# --- generated shops


@pytest.mark.parametrize("profile", ["embedded", "embedded-small"])
def test_scores_of_generated_shops_are_defined_by_the_list(profile: str) -> None:
    env: Any = make_env(WebShopEnv, profile=profile)
    assert env.base.scoring == {}
    _, info = env.reset(seed=0)
    assert info["tagger"] == "builtin"
    env.close()
    env = make_env(WebShopEnv, profile=profile, tagger="all-words")
    assert env.base.scoring == {"scored_with": "all-words"}
    env.close()


# --- taggers by name


def test_built_in_nouns() -> None:
    nouns = make_tagger("builtin").nouns
    assert nouns("Women's Washable Rug for the Living-Room, 2 Pack") == ("women", "rug", "living", "room", "pack")
    assert nouns("") == nouns("2 x 4 — & of the") == ()
    assert make_tagger("all-words").nouns("The Soft rug, 3pc") == ("soft", "rug", "pc")


def test_a_tagger_of_ones_own(tiny_shop: Shop) -> None:
    own = nouns.NounTagger(name="mine-1", nouns=lambda title: tuple(title.split()))
    assert find_tagger(own, tiny_shop.products, tiny_shop.profile) is own
    shop = Shop(tiny_shop.products, tiny_shop.profile, tagger=own)
    assert shop.scoring["scored_with"] == "mine-1"
    assert "not by en_core_web_sm" in shop.scoring["approximate"]

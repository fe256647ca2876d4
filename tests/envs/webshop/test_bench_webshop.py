"""`turngym bench webshop` at tiny sizes, and the plain scorer that the big shop's ranking is checked with."""

from __future__ import annotations

import importlib
import json
import sys
from functools import partial
from pathlib import Path

import pytest

from turngym.envs.core.errors import TurngymError
from turngym.envs.webshop.env import ShopSession
from turngym.envs.webshop.shop import Shop, open_shop
from turngym.retrieval.bm25 import LuceneIndex
from turngym.scripts.bench.webshop import big, steps
from turngym.scripts.bench.webshop import main as bench
from turngym.scripts.bench.webshop.big_shop import BigShop


@pytest.mark.long
def test_steps_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("bs4", reason="the peer needs beautifulsoup4")
    out = tmp_path / "figures.json"
    options = {"steps": 300, "peer-steps": 60, "envs": 20, "products": 0, "json": out}
    bench.main([text for name, value in options.items() for text in (f"--{name}", str(value))])
    shown = capsys.readouterr().out
    assert "same observation and reward as the peer" in shown
    figures = json.loads(out.read_text())
    same, compared = figures["steps/same"]
    assert same == compared >= 60
    mix = figures["steps/mix"]
    assert mix["searches"] + mix["clicks"] + mix["purchases"] == figures["steps/gym.make, guarded"]["steps"] >= 300
    assert mix["searches"] > 20
    assert mix["purchases"] > 10
    assert 1 < figures["memory/env_kb"] < 50
    assert figures["memory/session_ids_kept"] == 1000


def test_without_the_peers_libraries(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bs4", None)
    options = ["--steps", "100", "--envs", "0", "--products", "0", "--json", str(tmp_path / "figures.json")]
    bench.main(options)
    said = capsys.readouterr().out
    assert "the peer is left out, bs4 is not installed: pip install beautifulsoup4" in said
    assert "no peer" in said
    assert "nan" not in said
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert "steps/same" not in figures
    assert figures["steps/peer"].startswith("bs4 is not installed")
    assert figures["steps/bare session"]["ratio"] is None


def test_the_peer_sees_what_a_session_sees(tiny_shop: Shop) -> None:
    """Odd pages included: blank bullets, no description, values with quotes, pages of results that are empty."""
    pytest.importorskip("bs4", reason="the peer needs beautifulsoup4")
    peer = importlib.import_module("turngym.scripts.bench.webshop.peer").HtmlSession(tiny_shop)
    session = ShopSession(tiny_shop)
    assert peer.reset(0) == session.reset(0)[0]
    pages = ("search[mug]", "click[mug0000001]", "click[features]", "click[< prev]", "click[description]", "nonsense")
    choices = ("click[< prev]", 'click[red "deluxe"]', "click[grün]", "click[large]", "click[< prev]", "click[next >]")
    rest = ("click[next >]", "click[back to search]", "search[odd jug]", "click[odd0000001]", "click[same]")
    for action in (*pages, *choices, *rest, "click[description]", "click[< prev]", "click[reviews]", "click[buy now]"):
        assert peer.step(action) == session.step(action)[:3], action


def test_scripts_end_with_a_purchase() -> None:
    shop = open_shop("embedded-small")
    scripts = steps.make_scripts(shop, 80, 5)
    assert scripts == steps.make_scripts(shop, 80, 5) != steps.make_scripts(shop, 80, 6)
    assert sum(len(script.actions) for script in scripts) >= 80
    assert sum(script.actions[-1] == "click[buy now]" for script in scripts) >= len(scripts) - 1
    shop.close()


@pytest.mark.long
@pytest.mark.parametrize("catalog", big.CATALOGUES)
def test_a_big_shop_in_small(tmp_path: Path, catalog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # the real vocabulary of 300,000 words takes seconds to make up
    monkeypatch.setattr(big, "BigShop", partial(BigShop, words=2000))
    monkeypatch.setattr(big, "QUERIES", 40)
    folder = tmp_path / "shop"
    built = big.build_shop(folder, catalog, 500)
    assert built["products"] == 500
    assert built["disk_mb"] > 0.1
    found = big.search(folder, catalog, 500)
    assert 0 < found["cpu_median_ms"] <= found["cpu_p99_ms"]
    assert found["queries"] >= 35
    checked = big.check(folder, catalog, 500)
    assert checked["exact"] == checked["checked"] >= 6
    assert checked["wrong"] == []


@pytest.mark.long
def test_each_step_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    assert big.step("build", tmp_path / "shop", "generated", 60)["products"] == 60
    with pytest.raises(TurngymError, match="ended with status"):
        big.step("search", tmp_path / "nothing", "generated", 60)


def test_the_plain_scorer_ranks_as_lucene_does() -> None:
    """On texts longer than 40 words, whose lengths lose precision, with ties and with words that repeat."""
    texts = [*BigShop(words=300, length=70.0).documents(300), ("B000000001", "same"), ("A000000001", "same"), ("C", "")]
    queries = [*list(BigShop(words=300, length=70.0).queries(12, 300)), "same", "", "same same unheard"]
    index = LuceneIndex.build(texts)
    plain = big.plain_search(texts, queries, k=10)
    assert [[name for name, _ in index.search(query, 10)] for query in queries] == plain
    assert plain[-3:] == [["A000000001", "B000000001"], [], ["A000000001", "B000000001"]]
    assert all(len(found) == 10 for found in plain[:12])


@pytest.mark.parametrize(
    ("length", "kept"), [(0, 0), (39, 39), (40, 40), (41, 40), (42, 42), (57, 56), (100, 96), (1000, 984)]
)
def test_lengths_lose_what_lucene_loses(length: int, kept: int) -> None:
    assert big._lossy(length) == kept

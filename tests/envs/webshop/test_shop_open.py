"""Opening shops: profiles, files, one copy per process, mapped files, and the tasks that goals become."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from turngym.envs.webshop import open_catalog
from turngym.envs.webshop import shop as shop_module
from turngym.envs.webshop.open_catalog import load_catalog
from turngym.envs.webshop.products import ShopDataError, find_profile
from turngym.envs.webshop.shop import Shop, goal_task, open_shop


def record(number: int) -> dict[str, Any]:
    colors = ["red", "blue", "lime green"][: 1 + number % 3]
    return {
        "asin": f"B{number:09d}",
        "name": f"Table number {number}",
        "full_description": "wood" * (number % 2),
        "small_description": [f"bullet {number}"],
        "pricing": ["$10.00 - $90.00", "", "$25.00"][number % 3],
        "images": [],
        "category": ["garden", "beauty"][number % 2],
        "query": "tables",
        "product_category": "Home › Tables",
        "customization_options": {"Color": [{"value": color} for color in colors]},
    }


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of 30 products in the original's files, as the 1k and as the full shop."""
    items = [record(number) for number in range(30)]
    wish = {"instruction": "Find me a table", "instruction_attributes": ["oak"]}
    ins = {item["asin"]: {"attributes": ["oak", f"n{place}"], **wish} for place, item in enumerate(items)}
    one = {"instruction": "a table.", "instruction_attributes": ["oak"], "instruction_options": ["red"]}
    for suffix in ("", "_1000"):
        (tmp_path / f"items_shuffle{suffix}.json").write_text(json.dumps(items), "utf-8")
        (tmp_path / f"items_ins_v2{suffix}.json").write_text(json.dumps(ins), "utf-8")
    (tmp_path / "items_human_ins.json").write_text(json.dumps({"B000000004": [one | {"worker_id": "W"}]}), "utf-8")
    return tmp_path


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every shop is mapped, in this folder."""
    monkeypatch.setattr(open_catalog, "MAPPED_FROM", 0)
    monkeypatch.setenv("TURNGYM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    yield
    for shop in list(shop_module._open.values()):
        while shop.users:
            shop.close()


def test_data_comes_from_the_argument_or_the_environment(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    with pytest.raises(ShopDataError, match=r"items_ins_v2_1000.json: .*WEBSHOP_DATA.*setup.sh"):
        open_shop("1k-synthetic")
    monkeypatch.setenv("WEBSHOP_DATA", str(data))
    assert len(open_shop("1k-synthetic").products) == 30
    (data / "items_human_ins.json").unlink()
    with pytest.raises(ShopDataError, match=r"items_human_ins\.json not found"):
        open_shop("full-human", data)


def test_one_shop_per_process_until_the_last_user_leaves(data: Path) -> None:
    first = open_shop("1k-synthetic", data)
    assert open_shop("1k-synthetic", str(data)) is first
    assert open_shop("1k-synthetic", data, price_seed=9) is not first
    first.close()
    assert first.search("table number")
    first.close()
    assert open_shop("1k-synthetic", data) is not first
    with pytest.raises(ShopDataError, match="closed"):
        first.search("something not asked before")
    first.close()


def test_a_mapped_shop_is_the_same_shop(data: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for profile in ("1k-synthetic", "1k-human"):
        mapped = open_shop(profile, data)
        with monkeypatch.context() as changed:
            changed.setattr(open_catalog, "MAPPED_FROM", 1 << 20)
            plain = Shop(load_catalog(find_profile(profile), data), find_profile(profile))
        assert mapped.fingerprint == plain.fingerprint
        assert list(mapped.products) == list(plain.products)
        assert mapped.products[2:4] == plain.products[2:4]
        assert list(mapped.goals) == list(plain.goals)
        assert mapped.search("table bullet 7") == plain.search("table bullet 7")
        assert mapped.search("table bullet 7")[0] == "B000000007"
        for asin in ("B000000000", "B000000029"):
            assert mapped.product(asin) == plain.product(asin)
            assert mapped.price(asin) == plain.price(asin)
        assert mapped.product("B00000003") is mapped.product("") is mapped.product("Z") is None
        assert goal_task(mapped, mapped.goals[0]) == goal_task(plain, plain.goals[0])
    assert len(list((cache / "webshop").iterdir())) == 2


def test_a_mapped_shop_is_built_once_and_follows_its_files(data: Path, cache: Path) -> None:
    first = open_shop("full-synthetic", data)
    before = first.products.sha256
    first.close()
    folder = next((cache / "webshop").iterdir())
    stamp = (folder / "manifest.json").stat().st_mtime_ns
    open_shop("full-synthetic", data).close()
    assert (folder / "manifest.json").stat().st_mtime_ns == stamp
    (data / "items_shuffle.json").write_text(json.dumps([record(number) for number in range(20)]), "utf-8")
    second = open_shop("full-synthetic", data)
    assert len(second.products) == 20
    assert second.products.sha256 != before


def mapped_folder(data: Path, cache: Path, profile: str) -> Path:
    before = set(cache.glob("webshop/*"))
    open_shop(profile, data).close()
    return (set(cache.glob("webshop/*")) - before).pop()


@pytest.mark.parametrize("name", ["products.bin", "asins.npy", "goal_order.npy", "pricing.npy"])
def test_a_damaged_folder_is_refused(data: Path, cache: Path, name: str) -> None:
    folder = mapped_folder(data, cache, "1k-synthetic")
    (folder / name).write_bytes((folder / name).read_bytes()[:-9])
    with pytest.raises(ShopDataError, match=r"cannot be used.*delete that folder"):
        open_shop("1k-synthetic", data)


@pytest.mark.parametrize("name", ["manifest.json", "asins.npy", "goal_order.npy", "pricing.npy", "products.crc.npy"])
def test_a_changed_byte_is_refused(data: Path, cache: Path, name: str) -> None:
    path = mapped_folder(data, cache, "1k-synthetic") / name
    content = bytearray(path.read_bytes())
    place = content.index(b'"sha256": "') + 12 if name == "manifest.json" else -3
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ShopDataError, match=r"checksum differs.*; delete that folder"):
        open_shop("1k-synthetic", data)


def test_a_changed_product_is_refused_when_it_is_read(data: Path, cache: Path) -> None:
    path = mapped_folder(data, cache, "1k-synthetic") / "products.bin"
    with closing(open_shop("1k-synthetic", data)) as shop:
        title = shop.products[3].title.encode()
    path.write_bytes(path.read_bytes().replace(title, title.swapcase(), 1))
    with closing(open_shop("1k-synthetic", data)) as shop:
        changed = [row for row in range(len(shop.products)) if not readable(shop, row)]
        assert len(changed) == 1
        with pytest.raises(ShopDataError, match=r"record \d+ was changed.*delete"):
            shop.products[changed[0]]


def readable(shop: Any, row: int) -> bool:
    try:
        return bool(shop.products[row])
    except ShopDataError:
        return False


def test_a_failed_build_leaves_nothing(data: Path, cache: Path) -> None:
    (data / "items_shuffle.json").write_text(json.dumps([record(0), {"asin": "B000000099"}]), "utf-8")
    with pytest.raises(ShopDataError, match=r"items_shuffle\.json, record 1, product 'B000000099'"):
        open_shop("full-synthetic", data)
    assert list((cache / "webshop").iterdir()) == []


def test_foreign_files_are_named(data: Path) -> None:
    shutil.copy(data / "items_ins_v2.json", data / "items_shuffle.json")
    with pytest.raises(ShopDataError, match=r"items_shuffle\.json begins with '{'"):
        open_shop("full-synthetic", data)


def test_tasks(data: Path) -> None:
    made = open_shop("1k-synthetic", data)
    goal = made.goals[3]
    task = goal_task(made, goal)
    assert (task.env_id, task.task_id, task.split) == ("turngym/WebShop-v0", "1k-synthetic/3", "eval")
    assert (task.category, task.cluster) == (goal.category, goal.asin)
    assert goal_task(made, goal, "mine").split == "mine"
    assert goal_task(made, goal) == task
    others = {goal_task(made, other).sha256 for other in made.goals}
    assert len(others) == len(made.goals)
    changed = open_shop("1k-synthetic", data, price_seed=1)
    assert goal_task(changed, changed.goals[3]).sha256 != task.sha256


def test_a_task_depends_on_the_product_that_is_scored(data: Path) -> None:
    before = open_shop("1k-synthetic", data)
    items = [record(number) for number in range(30)]
    for item in items:
        item["small_description"] = ["another bullet"]
    (data / "items_shuffle.json").write_text(json.dumps(items), "utf-8")
    after = open_shop("full-synthetic", data)
    pairs = zip(before.goals, after.goals, strict=True)
    assert all(
        goal_task(before, one).sha256 != goal_task(after, two).sha256 and one.instruction_text == two.instruction_text
        for one, two in pairs
    )


def test_products_that_are_not_there(data: Path) -> None:
    made = open_shop("1k-synthetic", data)
    assert made.product("B0") is None
    with pytest.raises(ShopDataError, match="product 'B0' is not in the shop"):
        made.price("B0")


def test_searches_are_remembered(data: Path) -> None:
    made = open_shop("1k-synthetic", data)
    assert made.search("table bullet 3") is made.search("table bullet 3")
    assert made.search("") == made.search(" ") == made.search("zzz") == ()


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_a_shop_whose_files_were_edited_is_read_anew(
    tmp_path: Path, cache: Path, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_catalog, "MAPPED_FROM", most)
    for name in ("Oak Table", "Elm Table"):
        (tmp_path / "items_shuffle_1000.json").write_text(json.dumps([record(1) | {"name": name}]), "utf-8")
        (tmp_path / "items_ins_v2_1000.json").write_text(json.dumps({"B000000001": {"attributes": []}}), "utf-8")
        # the first stays open, as a running environment's would
        product = open_shop("1k-synthetic", tmp_path).product("B000000001")
        assert product is not None
        assert product.title == name

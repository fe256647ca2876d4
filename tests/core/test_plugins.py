"""Objects of other packages: built-in names, paths, entry points, and what is said of those that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from turngym.core.plugins import PluginError, find, installed, is_path

BUILT_IN = {"plain": "the built-in one", "other": 2}


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An installed package `outside_pkg` that brings `fancy` and `plain` to the group `turngym.widgets`."""
    package, info = tmp_path / "outside_pkg", tmp_path / "outside_pkg-1.0.dist-info"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "made.py").write_text("def make():\n    return 'made'\n\n\nclass Box:\n    inside = 7\n")
    (package / "broken.py").write_text("import no_such_module_anywhere\n")
    other = tmp_path / "other_pkg-1.0.dist-info"
    for folder, name in ((info, "outside-pkg"), (other, "other-pkg")):
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (other / "entry_points.txt").write_text("[turngym.widgets]\ntwice = outside_pkg.made:Box\n")
    rows = [
        "twice = outside_pkg.made:make",
        "fancy = outside_pkg.made:make",
        "plain = outside_pkg.made:make",
        "gone = outside_pkg.made:nothing",
    ]
    (info / "entry_points.txt").write_text("\n".join(["[turngym.widgets]", *rows]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.startswith("outside_pkg")]:
        monkeypatch.delitem(sys.modules, name)
    return "turngym.widgets"


def test_names_paths_and_entry_points(outside: str) -> None:
    assert find(outside, "plain", BUILT_IN) == "the built-in one"
    assert find(outside, "fancy", BUILT_IN)() == "made"
    assert find(outside, "outside_pkg.made:make", BUILT_IN)() == "made"
    assert find(outside, "outside_pkg.made:Box.inside", BUILT_IN) == 7
    assert installed(outside) == ("fancy", "gone", "plain", "twice")
    assert installed("turngym.nothing") == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "fanzy",
            "unknown widget 'fanzy'; widgets are: plain, other, gift, fancy, gone, twice, package.module:name. Did",
        ),
        ("outside_pkg.absent:make", "widget 'outside_pkg.absent:make': cannot import 'outside_pkg.absent'"),
        ("outside_pkg.made:mak", "outside_pkg.made has no 'mak'. Did you mean 'make'?"),
        ("twice", "widget 'twice' is the name of several installed ones; valid: outside_pkg.made:Box, "),
    ],
)
def test_what_is_not_there_is_said_in_one_line(outside: str, name: str, text: str) -> None:
    with pytest.raises(PluginError) as caught:
        find(outside, name, BUILT_IN, known=("gift",))
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_a_path_looks_like() -> None:
    assert all(is_path(name) for name in ("a:b", "a.b_c:D", "a.b:C.d"))
    assert not any(is_path(name) for name in ("a", "a:", ":b", "http://host:80", "a/b:c", "a.b:c-d", "1a:b"))

"""The built site in a real browser, opened from a folder: search works, tables fit, no other host is asked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from web_browser import Browser, find_browser

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.long
WIDE_TABLES = (
    "[...document.querySelectorAll('.md-content table')].filter(t => t.scrollWidth > t.parentElement.clientWidth)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="needs turngym[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "-q", "--strict", "-d", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("no Chromium or Chrome is installed")
    with Browser(path, width=1280) as one:
        yield one


def test_search_works_in_a_folder(site: Path, browser: Browser) -> None:
    browser.open((site / "index.html").as_uri())
    browser.click("input.md-search__input", navigates=False)
    browser.type("reciprocal rank fusion")
    browser.wait_for("document.querySelectorAll('.md-search-result__item').length > 0")
    assert "etrieval" in browser.text(".md-search-result__list")


@pytest.mark.parametrize("page", ["index", "quickstart", "retrieval", "from_papers"])
def test_tables_fit_beside_the_lists_of_links(site: Path, browser: Browser, page: str) -> None:
    browser.open((site / f"{page}.html").as_uri())
    assert browser.value("document.querySelectorAll('.md-content table').length") > 0
    assert browser.value(f"{WIDE_TABLES}.map(t => t.textContent.trim().slice(0, 40))") == []
    asked = browser.value("performance.getEntriesByType('resource').map(one => one.name)")
    assert [name for name in asked if not name.startswith(("file:", "data:", "blob:"))] == []


@pytest.mark.parametrize("page", ["index", "getting_started", "research/real_model"])
def test_no_end_of_a_command_is_hidden(site: Path, browser: Browser, page: str) -> None:
    browser.open((site / f"{page}.html").as_uri())
    blocks = "[...document.querySelectorAll('.language-bash pre > code, .language-python pre > code')]"
    assert browser.value(f"{blocks}.length") > 2
    cut = f"{blocks}.filter(code => code.scrollWidth > code.clientWidth).map(code => code.textContent.slice(0, 40))"
    assert browser.value(cut) == []


def test_pages_are_there_as_markdown_and_notebooks(site: Path) -> None:
    listed = re.findall(r"\]\(([\w/]+\.md)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert len(listed) > 30
    assert [name for name in listed if not (site / name).is_file()] == []
    assert (site / "retrieval.md").read_text(encoding="utf-8") == (ROOT / "docs" / "retrieval.md").read_text(
        encoding="utf-8"
    )
    assert len(list((site / "notebooks").glob("*.ipynb"))) == 4

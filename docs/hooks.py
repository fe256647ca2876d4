"""mkdocs hook.

README, CONTRIBUTING and CHANGELOG of the repository's root become pages of the site, their links adapted. The API pages
get what they do not name themselves of their room's public names. The packed results in docs/results become tables.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_IDENTIFIER = re.compile(r"^::: (\S+)$", re.MULTILINE)
NOTEBOOKS = {
    "evaluate": "evaluation.md",
    "train": "training_in_python.md",
    "write_an_environment": "write_an_environment.md",
    "write_an_algorithm": "write_an_algorithm.md",
}
"""Name of a notebook -> the page that it is made of."""
_markdown: dict[str, str] = {}
"""Markdown of the pages of the site that is being built, by path."""
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
_TO_CODE = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)\s]+\.py\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages to those of the docs folder."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        content = page_text((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "results/index.html", content=results_page()))
    files.append(File.generated(config, "license.md", content=f"# License\n\n{(ROOT / 'LICENSE').read_text()}"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from docs/ to pages of the root lead to their copies in the site; API pages are completed."""
    for name, copy in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({copy}")
    if page.file.src_uri == "results.md":
        markdown = markdown.replace("<!-- the tables of docs/results -->", results_text())
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder == "api":
        return with_public_names(markdown, name.removesuffix(".md"))
    _markdown[page.file.src_uri] = markdown
    return markdown


def on_post_build(config: Any) -> None:
    """Writes the pages' Markdown, llms.txt and the notebooks into the site."""
    site = Path(config.site_dir)
    for name, text in _markdown.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text, encoding="utf-8")
    (site / "llms.txt").write_text(llms_text(config.nav, _markdown, config.site_description), encoding="utf-8")
    write_notebooks(site / "notebooks")


def llms_text(nav: list[Any], pages: dict[str, str], description: str) -> str:
    """llms.txt: a summary, then by section of `nav` the pages: links to their Markdown, and their first sentences."""
    parts = [f"# turngym\n\n> {description}"]
    for entry in nav:
        ((section, inside),) = entry.items()
        listed = [(section, inside)] if isinstance(inside, str) else [item for one in inside for item in one.items()]
        rows = [f"- [{title}]({name}): {first_sentence(pages[name])}" for title, name in listed if name in pages]
        if rows:
            parts.append("\n".join([f"## {section}", "", *rows]))
    return "\n\n".join(parts) + "\n"


def first_sentence(markdown: str) -> str:
    """The first sentence of a page's first paragraph, without the targets of links."""
    text = re.sub(r"^```.*?^```$", "", markdown, flags=re.MULTILINE | re.DOTALL)
    paragraph = next(part for part in text.split("\n\n")[1:] if part.strip() and part.lstrip()[0] not in "|#<!")
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", " ".join(paragraph.split()))
    return plain.partition(". ")[0].rstrip(".:") + "."


_BLOCK = re.compile(r"^(<!-- .+? -->\n)?```(\w+)([^\n]*)\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)


def notebook(page: str) -> dict[str, Any]:
    """A page as a Jupyter notebook (format 4.5).

    Python blocks are cells of code; a block with a title begins with `%%writefile`. Blocks that a comment excludes from
    the page's test, and blocks of other languages without a title, stay text.
    """
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        if text.strip():
            more: dict[str, Any] = {"execution_count": None, "outputs": []} if kind == "code" else {}
            source = text.strip("\n").splitlines(keepends=True)
            cells.append({"id": f"cell-{len(cells)}", "cell_type": kind, "metadata": {}, "source": source, **more})

    place = 0
    for block in _BLOCK.finditer(page):
        excluded, language, options, text = block.groups()
        title = re.search(r'title="([^"]+)"', options)
        if excluded or (language != "python" and title is None):
            continue
        add("markdown", page[place : block.start()])
        if title is not None and "/" in title[1]:
            add("code", f"import os\nos.makedirs({title[1].rpartition('/')[0]!r}, exist_ok=True)")
        add("code", text if title is None else f"%%writefile {title[1]}\n{text}")
        place = block.end()
    add("markdown", page[place:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def write_notebooks(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in NOTEBOOKS.items():
        made = notebook((ROOT / "docs" / page).read_text(encoding="utf-8"))
        (folder / f"{name}.ipynb").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def results_page() -> str:
    """The packed results as one page that holds every episode."""
    from turngym.scripts.result_table import page

    text = page(_results(), "Results that come with turngym", ".")
    return text.replace('<main id="tables">', '<p><a href="../results.html">turngym</a></p>\n<main id="tables">', 1)


def results_text() -> str:
    """Their tables in Markdown."""
    from turngym.scripts.result_table import as_markdown

    return as_markdown(_results(), "###")


@cache
def _results() -> Any:
    """The packed results by table. They are all checked when they are read, so they are read once."""
    from turngym.scripts.result_table import grouped, read_folder

    return grouped(read_folder(ROOT / "docs" / "results"))


def with_public_names(page: str, room: str) -> str:
    """An API page with a last section on the public names of its room that it does not name itself."""
    named = set(_IDENTIFIER.findall(page))
    rest = [full for full in public_names(room) if full not in named and full.rpartition(".")[0] not in named]
    return "\n\n".join([page, "## Further public names", *(f"::: {full}" for full in rest)]) if rest else page


def public_names(room: str) -> list[str]:
    """Where the names that a room exports are defined, as its `__init__.pyi` says."""
    stub = ROOT / room / "__init__.pyi"
    if not stub.exists():
        return []
    imports = [node for node in ast.parse(stub.read_text(encoding="utf-8")).body if isinstance(node, ast.ImportFrom)]
    return [f"turngym.{room}.{node.module}.{alias.name}" for node in imports for alias in node.names]


def page_text(text: str) -> str:
    """The Markdown of a file in the root, its links as they must read inside docs/."""
    pages = {**PAGES, "LICENSE": "license.md"}
    # the site has no code: a link to it becomes its name
    text = _TO_CODE.sub(r"`\1`", text)
    return _LINK.sub(lambda found: pages.get(found[1], found[1].removeprefix("docs/")), text)


if __name__ == "__main__" and sys.argv[1:2] == ["notebooks"]:
    write_notebooks(Path(sys.argv[2]))

"""mkdocs hook, and the page that lists every file.

README, CONTRIBUTING and CHANGELOG of the repository's root become pages of the site, their links adapted. The API pages
get what they do not name themselves of their room's public names.
`python docs/hooks.py` writes docs/tree.md anew from the first lines of the modules' docstrings.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
ROOMS = ("envs", "retrieval", "agents", "trainers", "scripts")
_IDENTIFIER = re.compile(r"^::: (\S+)$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages to those of the docs folder."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        content = page_text((ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=content))
    files.append(File.generated(config, "license.md", content=f"# License\n\n{(ROOT / 'LICENSE').read_text()}"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links from docs/ to pages of the root lead to their copies in the site; API pages are completed."""
    for name, copy in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({copy}")
    folder, _, name = page.file.src_uri.rpartition("/")
    return with_public_names(markdown, name.removesuffix(".md")) if folder == "api" else markdown


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
    return [f"{node.module}.{alias.name}" for node in imports for alias in node.names]


def page_text(text: str) -> str:
    """The Markdown of a file in the root, its links as they must read inside docs/."""
    pages = {**PAGES, "LICENSE": "license.md"}
    return _LINK.sub(lambda found: pages.get(found[1], found[1].removeprefix("docs/")), text)


def tree_text() -> str:
    """docs/tree.md: one line per module, folder by folder."""
    parts = [
        "# Every file",
        "One line per module, the first of its docstring; data files are left out. Written by `python docs/hooks.py`,",
        "and a test compares. Who may import whom: [architecture](architecture.md).",
    ]
    lines = ["\n\n".join([parts[0], "\n".join(parts[1:])])]
    for room in ROOMS:
        lines += [f"\n## {room}\n", first_line(ROOT / room / "__init__.py")]
        for folder in sorted({path.parent for path in (ROOT / room).rglob("*.py")}):
            name = folder.relative_to(ROOT).as_posix()
            if folder != ROOT / room:
                lines += [f"\n### {name}\n", first_line(folder / "__init__.py")]
            lines += ["", "| | |", "| --- | --- |"]
            modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            lines += [f"| `{path.name}` | {cell(first_line(path))} |" for path in modules]
    return "\n".join(lines) + "\n"


def first_line(path: Path) -> str:
    """First line of a module's docstring, read without importing it."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n")[0]


def cell(text: str) -> str:
    """Text as it stands in a cell of a Markdown table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    (ROOT / "docs" / "tree.md").write_text(tree_text(), encoding="utf-8")

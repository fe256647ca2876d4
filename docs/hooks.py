"""mkdocs hook: README, CONTRIBUTING and CHANGELOG of the repository's root are pages of the site, links adapted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages to those of the docs folder."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=page_text((root / name).read_text(encoding="utf-8"))))
    return files


def page_text(text: str) -> str:
    """The Markdown of a file in the root, its links as they must read inside docs/."""
    return _LINK.sub(lambda found: PAGES.get(found[1], found[1].removeprefix("docs/")), text)

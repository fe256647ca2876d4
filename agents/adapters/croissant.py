"""Panels as a data set in Croissant 1.0 (mlcommons.org/croissant), with the minimal responsible-AI fields.

What Croissant cannot hold: that a task is a game. The records are ids, hashes, splits and categories; what is played
comes with turngym, or from the benchmark's own files, which the hashes tell apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import date
from hashlib import sha256
from pathlib import Path
from typing import Any

from turngym.core.whole_files import atomic_write
from turngym.envs.panels import Panel, PanelError, write_panel

FIELDS = {
    "task_id": "Id of the task in its environment.",
    "sha256": "SHA-256 of everything that fixes the task: equal hashes mean equal tasks.",
    "split": "Split of the environment that the task is of.",
    "category": "Kind of task, by which results have rows.",
}
"""Columns of a manifest's rows, in their order."""


def _own(names: str) -> dict[str, str]:
    """Words of Croissant's own vocabulary."""
    return {name: f"cr:{name}" for name in names.split()}


CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    **_own("citeAs column"),
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    **_own("equivalentProperty"),
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **_own("extract field fileObject fileProperty fileSet format includes isLiveDataset jsonPath key md5 parentField"),
    **_own("path recordSet references regex repeated replace samplingRate separator source subField transform"),
}


def write_croissant(panels: Sequence[Panel], out: Path, *, name: str, url: str, license: str, creator: str) -> Path:
    """Writes the manifests and `croissant.json` into the folder `out`, and returns the path of the latter.
    `license` is that of the manifests, as an SPDX id.

    Raises PanelError for a panel that is named twice, and where a manifest in `out` has other content.
    """
    names = [panel.full_name for panel in panels]
    if repeated := sorted({panel_name for panel_name in names if names.count(panel_name) > 1}):
        raise PanelError(f"panel {repeated[0]} is named twice; valid: once")
    files = [write_panel(panel, out) for panel in panels]
    metadata = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": ["http://mlcommons.org/croissant/1.0", "http://mlcommons.org/croissant/RAI/1.0"],
        "name": name,
        "description": f"Fixed lists of hashed tasks of language agents' environments: {', '.join(names)}.",
        "url": url,
        "license": license,
        "creator": {"@type": "Organization", "name": creator},
        "datePublished": date.today().isoformat(),
        "version": f"{max(panel.version for panel in panels)}.0.0",
        "citeAs": f"{creator}: {name}. {url}",
        "distribution": [_file(path) for path in files],
        "recordSet": [_records(panel) for panel in panels],
        "rai:dataCollection": "Tasks are the environments' own; every one was begun once to compute its hash.",
        "rai:dataUseCases": "Evaluation of agents on equal tasks, and not training on them.",
        "rai:dataLimitations": "Text games in English; success in them says nothing of other tasks.",
        "rai:dataBiases": "Goals and things have the frequencies of the environment that made them.",
        "rai:personalSensitiveInformation": "None: ids and hashes.",
    }
    path = out / "croissant.json"
    with atomic_write(path) as file:
        file.write(json.dumps(metadata, indent=1, ensure_ascii=False) + "\n")
    return path


def _file(path: Path) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": path.name,
        "name": path.name,
        "contentUrl": path.name,
        "encodingFormat": "application/json",
        "sha256": sha256(path.read_bytes()).hexdigest(),
    }


def _records(panel: Panel) -> dict[str, Any]:
    kwargs = json.dumps(dict(panel.make_kwargs))
    return {
        "@type": "cr:RecordSet",
        "@id": panel.full_name,
        "name": panel.full_name,
        "description": f"{len(panel.tasks)} tasks of {panel.env_id}, made with {kwargs}; panel's hash {panel.sha256}.",
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{panel.full_name}/{column}",
                "name": column,
                "description": description,
                "dataType": "sc:Text",
                "source": {
                    "fileObject": {"@id": f"{panel.full_name}.json"},
                    "extract": {"jsonPath": f"$.tasks[*][{index}]"},
                },
            }
            for index, (column, description) in enumerate(FIELDS.items())
        ],
    }

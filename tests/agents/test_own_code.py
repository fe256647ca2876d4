"""Folders that bring code of their own: it is never run, nothing is asked, and the error is one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_requests import tiny

from turngym.agents.models import load_model, load_tokenizer, model_config
from turngym.core.errors import TurngymError
from turngym.retrieval.core import RetrievalError
from turngym.retrieval.encoders import HuggingFaceEncoder
from turngym.retrieval.hybrid import open_reranker
from turngym.scripts.plan import _shape
from turngym.trainers.scorer import load_student

KINDS = ("AutoConfig", "AutoTokenizer", "AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification")
LOADERS: dict[str, Callable[[Path], Any]] = {
    "model": load_model,
    "student": lambda folder: load_student(folder, "float32", "cpu"),
    "configuration": model_config,
    "plan": lambda folder: _shape(str(folder)),
    "tokenizer": load_tokenizer,
    "encoder": lambda folder: HuggingFaceEncoder(str(folder), "plain"),
    "reranker": lambda folder: open_reranker(f"hf:{folder}"),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_code_of_a_folder_is_never_run(loader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `y` on a pipe ran it."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    tiny("Llama").save_pretrained(folder)
    places = {kind: ["own.Own", None] if kind == "AutoTokenizer" else "own.Own" for kind in KINDS}
    for name, more in (
        ("config.json", {"model_type": "own_family", "architectures": ["OwnForCausalLM"]}),
        ("tokenizer_config.json", {"tokenizer_class": "OwnTokenizer"}),
    ):
        found = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        (folder / name).write_text(json.dumps(found | more | {"auto_map": places}))
    (folder / "own.py").write_text(f"open({str(ran)!r}, 'w').write('x')\nclass Own: ...\n")
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("asked on standard input"))
    with pytest.raises((TurngymError, RetrievalError)) as error:
        LOADERS[loader](folder)
    assert "code of its own" in str(error.value)
    assert "\n" not in str(error.value)
    assert not ran.exists()

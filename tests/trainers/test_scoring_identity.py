"""What scores depend on besides the tasks is part of a training run's identity, and is said at its start."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_runs import command, save_tiny

from turngym.agents.evaluation.compare import spec_of
from turngym.envs.panels import panel_of_env, write_panel
from turngym.envs.webshop import nouns
from turngym.scripts.main import main


class Tagger:
    """Finds no nouns."""

    name = "en_core_web_sm-9.9.9"

    def __init__(self, model: str) -> None: ...

    def spans(self, titles: Any) -> Any:
        return (np.zeros((0, 2), dtype=np.int64) for _ in titles)


@pytest.mark.long
def test_a_run_is_not_resumed_with_another_scoring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nouns, "Pipeline", Tagger)
    monkeypatch.setenv("TURNGYM_CACHE", str(tmp_path / "cache"))
    item = {"full_description": "", "small_description": ["soft"], "category": "c", "query": "q"}
    item |= {"product_category": "p", "pricing": "", "customization_options": ""}
    names = [f"B{number:09}" for number in range(210)]
    wish = {"attributes": ["soft"], "instruction_attributes": ["soft"]}
    data = tmp_path / "data"
    data.mkdir()
    items = [{**item, "asin": name, "name": f"lamp {name}"} for name in names]
    (data / "items_shuffle.json").write_text(json.dumps(items))
    ins = {name: {**wish, "instruction": f"find {name}"} for name in names}
    (data / "items_ins_v2.json").write_text(json.dumps(ins))
    make = {"profile": "full-synthetic", "split": "eval"}
    panel = panel_of_env("mine", "turngym/WebShop-v0", make_kwargs=make, data=str(data))
    save_tiny(tmp_path / "student")
    words = [*command(tmp_path, tmp_path / "run", "grpo"), "--env", "turngym/WebShop-v0", "--data", str(data)]
    words = [word for place, word in enumerate(words) if "--teacher" not in words[max(0, place - 1) : place + 1]]
    words += ["--env-kwargs", '{"profile": "full-synthetic"}', "--split", "train", "--grpo.n", "2"]
    words += ["--panel", str(write_panel(panel, tmp_path)), "--eval-limit", "2", "--eval-samples", "1"]
    words += ["--workers", "0"]
    assert main(["train", *words[1:], "--steps", "1"]) == 0
    # a line of the terminal is as wide as it is
    said = " ".join(capsys.readouterr().err.split())
    why = "nouns of titles by builtin, not by en_core_web_sm: `turngym index nouns --profile full-synthetic`"
    assert f"the rewards of turngym/WebShop-v0 are approximate ({why})" in said
    assert f"evaluations: scores of mine-v1 are approximate ({why})" in said
    (trace,) = (tmp_path / "run" / "eval").glob("step_000001.jsonl")
    assert spec_of(trace).play.scoring["scored_with"] == "builtin"
    # the run's environment goes with the run, and its shop with it
    gc.collect()
    nouns.record_nouns("full-synthetic", data)
    assert main(["train", *words[1:], "--steps", "2", "--resume"]) == 2
    assert "scored_with" in capsys.readouterr().err

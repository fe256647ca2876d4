"""`turngym trace picture`: the frames of an episode, and a file that needs nothing else and stays still if asked to."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from turngym.agents import evaluate
from turngym.core.episode import Episode
from turngym.core.trace import read_trace
from turngym.scripts.main import main
from turngym.scripts.trace_picture import frames

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    evaluate("alfworld-quickstart", "expert", noise=0.6, samples=1, limit=6, workers=0, out=out, progress=False)
    return out / "trace.jsonl"


def test_every_turn_has_two_frames(trace: Path) -> None:
    episode: Episode = read_trace(trace)[0][0]
    shown = frames(episode, 60)
    assert len(shown) == 2 * episode.depth + 1
    assert shown[1][len(shown[0])] == (f"> {episode.turns[0].action}", "did")
    assert all(first == second[: len(first)] for first, second in pairwise(shown))
    assert max(len(text) for text, _ in shown[-1]) <= 60
    assert shown[-1][-1][0] == f"{'won' if episode.success else 'lost'} after {episode.depth} turns"
    refused = [turn.verdict.value for turn in episode.turns if not turn.verdict.valid]
    assert [text.strip() for text, kind in shown[-1] if kind == "bad" and "after" not in text] == refused


def test_the_file(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "pictures" / "a.svg"
    won = next(episode for episode in read_trace(trace)[0] if episode.success)
    assert main(["trace", "picture", str(trace), "--out", str(out), "--rows", "9", "--seconds", "2"]) == 0
    assert f"{won.task.task_id} sample 0, won in {won.depth} turns" in capsys.readouterr().out
    tree = ElementTree.fromstring(out.read_text(encoding="utf-8"))
    groups = tree.findall(f"{SVG}g")
    assert len(groups) == 2 * won.depth + 1
    assert max(len(group) for group in groups) == 9
    # one after the other, two seconds each; the last one stays for three times as long
    count = 2 * won.depth + 3
    delays = [float(re.findall(r"delay: (-[\d.]+)s", group.attrib["style"])[0]) for group in groups]
    assert delays == [2 * place - 2 * count for place in range(len(groups))]
    style = "".join(tree.itertext())
    assert f"shown {2 * count}s step-end infinite" in style
    assert "prefers-reduced-motion: no-preference" in style
    assert "http" not in re.sub(r'xmlns="[^"]+"', "", out.read_text(encoding="utf-8"))


def test_a_task_that_is_not_there(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["trace", "picture", str(trace), "--out", str(tmp_path / "a.svg")]
    assert main([*words, "--task", "nowhere"]) == 2
    assert main([*words, "--rows", "1"]) == 2
    said = capsys.readouterr().err
    assert "has no episode of 'nowhere', sample 0" in said
    assert "--rows is " in said


def test_the_picture_of_the_readme_is_made_by_the_command(tmp_path: Path) -> None:
    packed, out = ROOT / "docs" / "results" / "alfworld-teacher.result.xz", tmp_path / "a.svg"
    assert main(["trace", "picture", str(packed), "--task", "generated/small/eval/9", "--out", str(out)]) == 0
    assert out.read_text() == (ROOT / "docs" / "episode.svg").read_text()

"""`turngym trace`: selection, filter, Parquet, and a page that shows any text without running it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree, rmtree

import numpy as np
import pytest
from toy_evaluation import toy_spec
from web_browser import Browser, find_browser

from turngym.agents import play_episodes
from turngym.agents.play_spec import EndpointChat, OpenAI, Window
from turngym.agents.proxy.turn_records import TurnRecorder
from turngym.agents.worlds import load_world
from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.spec import to_table
from turngym.core.task import Task, Verdict
from turngym.core.trace import TraceWriter
from turngym.scripts import trace
from turngym.scripts.trace import Select
from turngym.scripts.trace_pages import PAGE, write_page
from turngym.scripts.trace_prompt import Prompts

EVIL = "</script><script>alert(1)</script><!-- <b> & \" ' \u2028 \ud800"


def episode(
    sample: int, *, won: bool, category: str = "heat", verdict: Verdict = Verdict.OK, text: str = "o"
) -> Episode:
    task = Task(env_id="toy", task_id=f"train/{category}/{sample}", sha256="0" * 64, split="train", category=category)
    turns = [
        Turn(
            index=index,
            observation=text,
            admissible=(text,),
            response=f"<think>{text}</think><action>go</action>",
            action="go",
            verdict=verdict if index else Verdict.OK,
            reward=float(won),
            prompt_span=(4 * index, 4 * index + 2),
            response_span=(4 * index + 2, 4 * index + 4),
            logprobs=np.array([-0.5, -np.inf], dtype=np.float32),
        )
        for index in range(2)
    ]
    return Episode(
        task=task,
        seed=0,
        sample=sample,
        group=0,
        segments=(np.arange(8, dtype=np.int32),),
        turns=tuple(turns),
        status=Status.COMPLETED if won else Status.TRUNCATED_TURNS,
        success=won,
        episode_return=float(won),
        system=text,
        final_observation=text,
        meta={"note": text},
    )


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(episode(0, won=True))
        writer.write(episode(1, won=False, category="cool"))
        writer.write(episode(2, won=False, verdict=Verdict.MALFORMED))
    with path.open("a") as out:
        out.write('{"schema": 1, "tas')
    return path


@pytest.mark.parametrize(
    ("select", "samples"),
    [
        (Select(outcome="won"), [0]),
        (Select(status=(Status.TRUNCATED_TURNS, Status.ERROR_ENV)), [1, 2]),
        (Select(category=("cool",)), [1]),
        (Select(task="heat/"), [0, 2]),
        (Select(verdict=(Verdict.MALFORMED,)), [2]),
        (Select(limit=2), [0, 1]),
    ],
)
def test_selection(select: Select, samples: list[int], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [item.sample for _, item in trace.selected([file], select)] == samples


def test_print(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert trace.main(["print", "--status", "truncated_turns", "--category", "cool", str(file)]) == 0
    out, err = capsys.readouterr()
    assert "lost truncated_turns    2 turns  return +0.00  cool     train/cool/1 sample 1" in out
    assert out.endswith("1 episode, 0 won (--turns prints what was said)\n")
    assert f"{file}: skipped line 4: torn" in err
    assert trace.main(["print", str(file), "--turns", "--width", "5", "--limit", "1"]) == 0
    out = capsys.readouterr().out
    assert "[1] policy (ok, reward 1, stop)\n    <thin... (35 characters)" in out
    assert out.endswith("1 episode, 1 won\n")


def test_any_text_can_be_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.write(episode(0, won=True, text=EVIL, category=EVIL))
    assert trace.main(["print", "--turns", str(tmp_path / "t.jsonl")]) == 0
    assert "<b> & \" ' " in capfd.readouterr().out


def test_filter_copies_exactly_and_never_overwrites(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "lost.jsonl"
    assert trace.main(["filter", str(file), "--out", str(out), "--outcome", "lost"]) == 0
    assert out.read_text().splitlines() == file.read_text().splitlines()[1:3]
    before = out.read_bytes()
    for words in (["filter"], ["html"], ["parquet"]):
        with pytest.raises(TurngymError, match="exists already"):
            trace.main([*words, str(file), "--out", str(out)])
    assert out.read_bytes() == before


@pytest.mark.parametrize("rows", ["turns"])
def test_a_seed_that_parquet_cannot_hold_is_one_line(rows: str, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.write(replace(episode(0, won=True), seed=2**70))
    argv = ["parquet", str(tmp_path / "t.jsonl"), "--out", str(tmp_path / "t.parquet"), "--rows", rows]
    with pytest.raises(TurngymError, match="sample 0 has seed 1180591620717411303424"):
        trace.main(argv)
    assert not (tmp_path / "t.parquet").exists()


def test_parquet_has_one_row_per_turn(file: Path, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    assert trace.main(["parquet", str(file), "--out", str(tmp_path / "t.parquet")]) == 0
    rows = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert [(row["sample"], row["turn"]) for row in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert rows[1]["response_ids"] == [6, 7]
    assert rows[1]["logprobs"] == [-0.5, float("-inf")]
    assert (rows[5]["verdict"], rows[5]["return"], rows[0]["success"], rows[0]["hint"]) == (
        "malformed",
        0.0,
        True,
        None,
    )


def embedded(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    data: dict[str, object] = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    return data


def test_the_page_escapes_everything(tmp_path: Path) -> None:
    evil = episode(0, won=True, text=EVIL, category=EVIL)
    write_page(tmp_path / "p.html", [(evil, Prompts(decode=None))], title=EVIL)
    text = (tmp_path / "p.html").read_text("utf-8")
    assert text.count("<script") == PAGE.read_text().count("<script")
    assert text.count("<!--") == 0
    assert "alert(1)</script>" not in text
    data = embedded(text)
    first = data["episodes"][0]  # type: ignore[index]
    assert first["turns"][0]["observation"] == EVIL
    assert first["turns"][1]["tokens"] == [[6, -0.5, None, None], [7, "-inf", None, None]]


def test_the_page_is_self_contained() -> None:
    text = PAGE.read_text()
    assert not re.search(r"(src|href)\s*=\s*[\"']?(https?:)?//", text)
    assert "innerHTML" not in text
    assert "__DATA__" in text


def test_prompts_and_tokens_are_decoded_from_the_recorded_ids(tmp_path: Path) -> None:
    prompts = Prompts(decode=lambda ids: "".join(f"<{token}>" for token in ids))
    write_page(tmp_path / "p.html", [(episode(0, won=True), prompts)], title="x")
    first, second = embedded((tmp_path / "p.html").read_text("utf-8"))["episodes"][0]["turns"]  # type: ignore[index]
    assert first["tokens"][0] == [2, -0.5, "<2>", None]
    assert (first["prompt"], first["begins"], first["read"]) == ("<0><1>", True, 2)
    assert (second["prompt"], second["begins"], second["read"]) == ("<4><5>", False, 6)
    assert prompts.whole(episode(0, won=True), episode(0, won=True).turns[1]) == "<0><1><2><3><4><5>"


@pytest.mark.parametrize("listing", ["\nAdmissible actions:\n- go\n- look", "\nPossible actions: go, look."])
def test_a_list_of_actions_is_folded_out_of_the_observation(listing: str, tmp_path: Path) -> None:
    turn = replace(episode(0, won=True).turns[0], observation=f"A room.{listing}", admissible=("go", "look"))
    write_page(tmp_path / "p.html", [(replace(episode(0, won=True), turns=(turn,)), Prompts(decode=None))], title="x")
    (shown,) = embedded((tmp_path / "p.html").read_text("utf-8"))["episodes"][0]["turns"]  # type: ignore[index]
    assert (shown["observation"], shown["listed"], shown["admissible"]) == ("A room.", True, ["go", "look"])


def test_print_prompt_shows_what_a_model_with_a_window_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    student = load_world("alfworld").checkpoint("student")
    played = copytree(student, tmp_path / "student")
    out = tmp_path / "t.jsonl"
    settings = {"memory": "window:1", "system": "Do the task.", "max_new_tokens": 4, "threads": 1}
    play_episodes(agent=f"model:{played}", tasks=1, out=out, env_kwargs={"max_turns": 3}, progress=False, **settings)  # type: ignore[arg-type]
    assert trace.main(["print", "--prompt", str(out)]) == 0
    said = capsys.readouterr().out
    before, third = said.split("  [2] prompt, ")
    assert third.count("Do the task.") == 1  # a window: every turn is a prompt of its own
    assert "Turns taken: 2. The last 1, oldest first:" in third
    assert "Observation 1:" not in third.partition("  [2] policy")[0]
    assert "Turns taken: 2" not in before
    rmtree(played)
    with pytest.raises(TurngymError, match="name its folder with --tokeniz"):
        trace.main(["print", "--prompt", str(out)])
    capsys.readouterr()
    assert trace.main(["print", "--prompt", str(out), "--tokenizer", str(student)]) == 0
    assert capsys.readouterr().out == said


def test_a_prompt_without_ids_is_built_again_from_the_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played = episode(0, won=True, text="o")
    turns = tuple(replace(turn, prompt_span=(0, 0), response_span=(0, 0), logprobs=None) for turn in played.turns)
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.write(replace(played, turns=turns, segments=(), system="Be good."))
    assert trace.main(["print", "--prompt", str(tmp_path / "t.jsonl")]) == 0
    second = capsys.readouterr().out.split("[1] prompt")[1].split("[1] policy")[0]
    said = "[system] Be good. [user] o [assistant] <think>o</think><action>go</action> [user] o"
    assert " ".join(second.split()) == said
    player = OpenAI(model="m", chat=EndpointChat(memory=Window(turns=0)))
    (tmp_path / "t.jsonl").unlink()
    with TraceWriter(tmp_path / "t.jsonl", to_table(toy_spec([played.task], player))) as writer:
        writer.write(replace(played, turns=turns, segments=(), system="Be good."))
    assert trace.main(["print", "--prompt", str(tmp_path / "t.jsonl")]) == 0
    second = capsys.readouterr().out.split("[1] prompt")[1].split("[1] policy")[0]
    assert " ".join(second.split()) == "[system] Be good. [user] o Turns taken: 1. Now turn 2. Observation 2: o"


@pytest.mark.long
def test_the_page_in_a_phone_folds_lists_and_shows_an_action_once(tmp_path: Path) -> None:
    browser = find_browser() or pytest.skip("no Chromium is installed")
    actions = tuple(f"take pen {number} from the very long shelf {number}" for number in range(400))
    listing = "\nAdmissible actions:" + "".join(f"\n- {action}" for action in actions)
    turn = replace(
        episode(0, won=True).turns[0],
        observation=f"A room.{listing}",
        admissible=actions,
        action=actions[7],
        response=f"<think>hm</think><action>{actions[7]}</action>",
    )
    second = replace(turn, index=1, prompt_span=(4, 6), response_span=(6, 8))
    played = [replace(episode(0, won=True), turns=(turn,)), replace(episode(1, won=False), turns=(turn, second))]
    written = [(one, Prompts(decode=None)) for one in played]
    write_page(tmp_path / "p.html", written, title="x")
    with Browser(browser) as page:
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=844, deviceScaleFactor=1, mobile=True)
        page.open((tmp_path / "p.html").as_uri())
        page.wait_for("document.querySelectorAll('.turn').length === 1")
        assert page.value("document.querySelector('main').innerText").count(actions[7]) == 1
        assert page.value("document.documentElement.scrollWidth") <= 390
        assert page.value("document.querySelector('.agent').getBoundingClientRect().bottom") < 844, "a screen away"
        assert not page.value("document.querySelector('#list').checkVisibility()")
        page.click("#menu", navigates=False)
        page.wait_for("document.querySelector('#list').checkVisibility()")
        page.click("#row-1", navigates=False)
        page.wait_for("document.querySelectorAll('.turn').length === 2")
        assert not page.value("document.querySelector('#list').checkVisibility()")


def endpoints(sample: int, *, status: Status, won: bool = False) -> Episode:
    """An endpoint's episode, whose first turn was replayed, in the way that recorded turns are."""
    made = episode(sample, won=won)
    plain = {"prompt_span": (0, 0), "response_span": (0, 0), "logprobs": None, "origin": "demonstration"}
    first, second = (replace(turn, **plain) for turn in made.turns)  # type: ignore[arg-type]
    turns = (replace(first, finish="scripted"), second)
    return replace(made, turns=turns, segments=(), status=status, meta={"agent": "openai:gpt"})


def test_an_error_is_not_lost_and_an_endpoint_bears_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    with TraceWriter(path) as writer:
        writer.write(endpoints(0, status=Status.ERROR_ENGINE))
        writer.write(endpoints(1, status=Status.TRUNCATED_TURNS))
        writer.write(endpoints(2, status=Status.ERROR_ENV, won=True))
    assert trace.main(["print", str(path), "--turns"]) == 0
    said = capsys.readouterr().out
    heads = [line.split()[:2] for line in said.splitlines() if " turns  return " in line]
    assert heads == [["error", "error_engine"], ["lost", "truncated_turns"], ["error", "error_env"]]
    assert said.count("[0] demonstration (") == said.count("[1] openai:gpt (") == 3
    assert said.endswith("3 episodes, 0 won, 2 ended in an error\n")
    for outcome, count in (("error", 2), ("lost", 1), ("won", 0)):
        assert trace.main(["print", str(path), "--outcome", outcome]) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith(f"{count} episode")
    out = tmp_path / "p.html"
    assert trace.main(["html", str(path), "--out", str(out)]) == 0
    shown = embedded(out.read_text())["episodes"]
    assert [one["outcome"] for one in shown] == ["error", "lost", "error"]  # type: ignore[attr-defined]
    assert shown[0]["turns"][1]["origin"] == "openai:gpt"  # type: ignore[index]
    browser = find_browser() or pytest.skip("no Chromium is installed")
    with Browser(browser) as page:
        page.open(out.as_uri())
        page.wait_for("document.querySelectorAll('.turn').length === 2")
        text = page.value("document.querySelector('article').innerText")
        assert "error · error_engine" in text
        assert "lost" not in text
        assert "openai:gpt" in text
        page.open(out.as_uri() + "#outcome=error")
        page.wait_for("document.querySelector('#count').textContent.startsWith('2 of 3')")


def test_html_verb(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    words = ["html", str(file), "--out", str(out), "--title", "Mine"]
    assert trace.main(words) == 0
    assert "3 episodes in" in capsys.readouterr().out
    assert embedded(out.read_text())["title"] == "Mine"
    assert trace.main([*words, "--overwrite", "--limit", "1"]) == 0
    assert len(embedded(out.read_text())["episodes"]) == 1  # type: ignore[arg-type]


def test_verify_names_damaged_lines_and_forgives_a_torn_last_one(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = file.read_bytes().rpartition(b"\n")[0] + b"\n"  # without the torn line that the file has
    file.write_bytes(whole)
    assert trace.main(["verify", str(file)]) == 0
    count = whole.count(b"\n")
    assert capsys.readouterr().out == f"{file}: {count} lines are whole\n"
    file.write_bytes(whole[:-40])
    assert trace.main(["verify", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: {count - 1} lines are whole, the last line is torn\n"
    first, rest = whole.split(b"\n", 1)
    unsealed = first[: first.rindex(b',"crc"')] + b"}\n"
    file.write_bytes(unsealed + rest.replace(b'"seed":0', b'"seed":9', 1))
    assert trace.main(["verify", str(file)]) == 1
    said = capsys.readouterr()
    assert said.out == f"{file}: {count - 1} lines are whole, 1 damaged, 1 without a checksum\n"
    assert said.err.startswith(f"{file}: line 2: it was changed after it was written")


def test_verify_reads_the_records_of_a_proxy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = TurnRecorder(tmp_path)
    for step in range(3):
        recorder.write({"kind": "trained", "step": step, "sessions": ["a-1"]})
    recorder.close()
    assert trace.main(["verify", str(recorder.path)]) == 0
    recorder.path.write_bytes(recorder.path.read_bytes().replace(b'"step":1', b'"step":7'))
    assert trace.main(["verify", str(recorder.path)]) == 1
    assert "records.jsonl: line 2: it was changed" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["filter"], ["parquet"], ["parquet", "--rows", "trajectories"], ["html"]])
def test_what_is_no_trace_leaves_nothing_behind(tmp_path: Path, file: Path, words: list[str]) -> None:
    notes, out = tmp_path / "notes.txt", tmp_path / "new" / "out"
    notes.write_text("hello\nworld\n")
    for files in ([notes], [file, notes], []):
        with pytest.raises(TurngymError, match=r"is no trace: none of its 2 lines|FILES must be given"):
            trace.main([words[0], *map(str, files), "--out", str(out), *words[1:]])
        assert not out.exists()

"""Keys stay out of files: addresses with passwords are refused, and what is recorded of a command has no keys in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from judged import judge_of
from openai_fake import FakeOpenAI, served

import turngym
from turngym.agents import evaluate
from turngym.agents.servers.server_options import ServersOf, TeacherServed
from turngym.agents.worlds import load_world
from turngym.core.clean_keys import recorded_command
from turngym.core.errors import TurngymError
from turngym.core.files import locked_folder
from turngym.core.provenance import write_config
from turngym.core.redaction import redacted
from turngym.core.settings import read_toml
from turngym.scripts.main import main

MARK = "S3CRETMARK"
ALL_HIDDEN = '{"hf_token": "***", "Cookie": "***", "auth": "***"}'
STUDENT = str(load_world("alfworld").checkpoint("student"))


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"--judge http://user:{MARK}@host:1/v1", "--judge http://***@host:1/v1"),
        (f"http://host/v1?api_key={MARK}&x=1", "http://host/v1?***"),
        (f'{{"api_key": "{MARK}", "top_p": 0.9}}', '{"api_key": "***", "top_p": 0.9}'),
        (f"{{'headers': {{'Authorization': 'Bearer {MARK}'}}}}", "{'headers': {'Authorization': '***'}}"),
        ('{"max_tokens": "3", "stop": "x", "keys": "k"}', '{"max_tokens": "3", "stop": "x", "keys": "k"}'),
        ("is it true? http://host/v1, or not? a@b.c", "is it true? http://host/v1, or not? a@b.c"),
        (f"http://user:a/{MARK}#1@host/v1", "http://***@host/v1"),
        (f'{{"api_key": ["{MARK}"], "password": 123456}}', '{"api_key": "***", "password": "***"}'),
        (json.dumps({"api_key": f'a"{MARK}'}), '{"api_key": "***"}'),
        (f'{{"hf_token": "{MARK}", "Cookie": "a={MARK}", "auth": {{"x": "{MARK}"}}}}', ALL_HIDDEN),
        ('{"eos_token": "</s>",  "key": null, "token": true}', '{"eos_token": "</s>",  "key": null, "token": true}'),
        # no key is a fraction
        ('{"kl_per_token": 0.5}', '{"kl_per_token": 0.5}'),
    ],
)
def test_what_may_be_a_key_is_hidden_and_nothing_else(text: str, kept: str) -> None:
    assert redacted(text) == kept


def test_nested_values_and_commands() -> None:
    value = {"api_key": MARK, "n": 1, "inner": [{"x-secret": MARK, "url": f"http://h/?{MARK}"}], "max_tokens": 5}
    kept = {"api_key": "***", "n": 1, "inner": [{"x-secret": "***", "url": "http://h/?***"}], "max_tokens": 5}
    assert redacted(value) == kept
    words = ["turngym", "eval", "--extra-body", json.dumps({"api_key": MARK}), f"--base-url=http://h/v1?k={MARK}"]
    assert recorded_command(words) == """turngym eval --extra-body '{"api_key": "***"}' '--base-url=http://h/v1?***'"""


WITH_PASSWORD = f"http://user:{MARK}@127.0.0.1:9/v1"
PANEL = ["--panel", "alfworld-quickstart", "--limit", "1", "--samples", "1", "--no-verify"]
TRAIN = ["train", "prm-rl", "--student", STUDENT, "--steps", "1"]


@pytest.mark.parametrize(
    "words",
    [
        ["eval", *PANEL, "--agent", "openai:m", "--base-url", WITH_PASSWORD],
        ["eval", *PANEL, "--env-kwargs", json.dumps({"retriever": WITH_PASSWORD})],
        [*TRAIN, "--judge", WITH_PASSWORD],
        [*TRAIN, "--policy-server", WITH_PASSWORD],
        ["serve", "proxy", "--student", STUDENT, "--judge", WITH_PASSWORD],
        ["index", "build", "--corpus", WITH_PASSWORD],
        ["pretrain", "--world", "x/y-v0", "--env-kwargs", json.dumps({"url": WITH_PASSWORD})],
    ],
)
def test_every_verb_refuses_an_address_with_a_password(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = [] if words[0] == "play" else ["--out", "run"]
    assert main([*words, *out]) == 2
    said = capsys.readouterr().err
    assert "an address with a user or a password would be written into files" in said
    assert MARK not in said
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_python_refuses_it_too(tmp_path: Path) -> None:
    refused = pytest.raises(TurngymError, match="an address with a user or a password")
    with refused:
        evaluate("alfworld-quickstart", "openai:m", base_url=WITH_PASSWORD, out=tmp_path / "e")
    with refused:
        gym.make("turngym/Search-v0", retriever=WITH_PASSWORD)
    with refused:
        judge_of(WITH_PASSWORD)
    with refused:
        ServersOf(policy_server=WITH_PASSWORD)
    with refused:
        TeacherServed(teacher_server=WITH_PASSWORD)
    with refused:
        turngym.train("prm-rl", student=STUDENT, out=tmp_path / "t", judge=WITH_PASSWORD)
    assert not list(tmp_path.iterdir())


def files_with_the_mark(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if path.is_file() and MARK.encode() in path.read_bytes()]


def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The status of `turngym` with these words, and all that it wrote; a lock names what the process was started as."""
    monkeypatch.setattr(sys, "argv", ["turngym", *words])
    capfd.readouterr()
    status = main(words)
    return status, "".join(capfd.readouterr())


@pytest.mark.parametrize("verb", ["eval", "rollout"])
def test_an_endpoints_query_and_body_are_in_no_file(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", f"{MARK}-{MARK}")
    out = tmp_path / "run"
    with served(FakeOpenAI()) as server:
        place = ["--base-url", f"{server.url}?api_key={MARK}", "--extra-body", json.dumps({"api_key": MARK})]
        more = PANEL if verb == "eval" else ["--tasks", "1"]
        target = out if verb == "eval" else out / "t.jsonl"
        words = [verb, "--agent", "openai:tiny", *more, *place, "--max-turns", "1", "--out", str(target)]
        done, said = command(monkeypatch, capfd, *words)
    assert list(out.rglob("*.toml")), said
    assert files_with_the_mark(out) == []
    assert MARK not in said
    assert done == 0, said
    (config,) = out.rglob("*.toml")
    assert "?***" in config.read_text()
    if verb == "eval":
        # what a report says of the run, and of its own command
        assert main(["report", f"mine={out}", "--out", str(tmp_path / "report")]) == 0
        assert list((tmp_path / "report").iterdir())
        assert files_with_the_mark(tmp_path) == []


@pytest.mark.long
def test_a_study_tells_nothing_of_the_environment(tmp_path: Path) -> None:
    data = Path(__file__).parents[2] / "docs" / "data" / "study-told-smollm2.json.gz"
    names = ("OPENAI_API_KEY", "TURNGYM_JUDGE_KEY", "TURNGYM_SERVER_KEY", "TURNGYM_PROXY_KEY")
    run = [sys.executable, "-m", "turngym.scripts", "study", "show", str(data), "--out", str(tmp_path / "s")]
    env = {**os.environ, **dict.fromkeys(names, MARK)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "s").rglob("*.*"))) > 1
    assert files_with_the_mark(tmp_path) == []
    assert MARK not in done.stdout + done.stderr


@pytest.mark.long
def test_a_proxy_that_learns_keeps_no_key(tmp_path: Path) -> None:
    """Marked: the judge's query and key, the clients' key, and the names that clients give themselves."""
    import httpx

    out = tmp_path / "run"
    words = ["serve", "proxy", "--student", STUDENT, "--out", str(out), "--port", "0", "--serve-from", "copy"]
    words += ["--judge", f"http://127.0.0.1:9/v1?api_key={MARK}", "--judge-tries", "1", "--device", "cpu"]
    # each turn a step: what a checkpoint holds is looked at, too
    words += ["--batch-turns", "1", "--threads", "1", "--run.tracker", "none"]
    env = {**os.environ, "TURNGYM_PROXY_KEY": MARK, "TURNGYM_JUDGE_KEY": MARK, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "turngym.scripts", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env) as process:
        assert process.stdout is not None
        said = [process.stdout.readline(), process.stdout.readline()]
        assert said[1].startswith("ready: "), process.stdout.read()
        address = said[1].split()[1].rstrip(",")
        with httpx.Client(headers={"Authorization": f"Bearer {MARK}", "X-Session-Id": MARK}, timeout=60) as client:
            messages = [{"role": "user", "content": "hello"}]
            for text in ("more", "thanks"):
                found = client.post(f"{address}/chat/completions", json={"messages": messages, "user": MARK})
                messages += [found.json()["choices"][0]["message"], {"role": "user", "content": text}]
            # a thumb takes the place of the judge, who is not there: the turn is trained on
            for turn in (0, 1):
                assert client.post(f"{address}/feedback", json={"score": 1, "turn": turn}).status_code == 200
            client.post(f"{address}/sessions/done", json={})
            for _ in range(600):
                health = client.get(address.removesuffix("/v1") + "/healthz").text
                if json.loads(health)["training"]["step"]:
                    break
                time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        said.append(process.stdout.read())
    assert list(out.rglob("state.json")), said
    assert files_with_the_mark(tmp_path) == []
    assert MARK not in "".join([*said, health])


def test_a_training_run_keeps_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    (tmp_path / "judge.toml").write_text("judge_tries = 1\njudge_unread = 1\n")
    words = ["--judge", f"http://127.0.0.1:9/v1?api_key={MARK}", "--config", str(tmp_path / "judge.toml")]
    words += ["--episodes", "2", "--max-turns", "1", "--max-new-tokens", "2", "--threads", "1", "--device", "cpu"]
    # nobody listens there: the judge's errors are told, without the query
    monkeypatch.setenv("TURNGYM_JUDGE_KEY", MARK)
    words += ["--eval-every", "0", "--tracker", "none", "--out", str(out)]
    _, said = command(monkeypatch, capfd, *TRAIN, *words)
    assert (out / "config.toml").is_file(), said
    assert "judge" in said
    assert files_with_the_mark(out) == []
    assert MARK not in said


def test_locks_and_configurations_hide_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["turngym", "serve", "--judge", f"http://h/v1?k={MARK}"])
    with locked_folder(tmp_path / "x"):
        assert files_with_the_mark(tmp_path) == []
        assert any(b"http://h/v1?***" in path.read_bytes() for path in (tmp_path / "x").iterdir())
    settings: dict[str, Any] = {"extra_body": json.dumps({"api_key": MARK}), "env_kwargs": {"token": MARK}}
    write_config(tmp_path / "config.toml", settings)
    assert files_with_the_mark(tmp_path) == []
    assert read_toml(tmp_path / "config.toml")["extra_body"] == '{"api_key": "***"}'

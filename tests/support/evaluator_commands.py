"""The commands of other people's evaluators, each in a process of its own, against a chat server on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def inspect_eval(folder: Path, url: str, *words: str, model: str = "expert", panel: str) -> Path:
    """`inspect eval turngym/alfworld` on `panel`; the log that it wrote."""
    logs = folder / "logs"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "inspect_ai", "eval", "turngym/alfworld", "--model", f"openai-api/local/{model}"),
            *("--model-base-url", url, "-T", f"panel={panel}", "-T", "samples=1", *words),
            *("--log-dir", str(logs), "--display", "plain"),
        ],
        cwd=folder, env={**os.environ, "LOCAL_API_KEY": "none"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (log,) = logs.glob("*.eval")
    return log


def vf_eval(folder: Path, url: str, *words: str, model: str = "expert") -> list[dict[str, Any]]:
    """`vf-eval turngym-alfworld`; the episodes that it wrote. `--no-push`: nothing of a test may be uploaded."""
    command = "import sys; from verifiers.v1.cli.eval.main import main; main(sys.argv[1:])"
    fixed = ["-m", model, "--client.base-url", url, "--client.api-key-var", "NO_KEY", "--no-push", "--no-rich"]
    done = subprocess.run(
        [sys.executable, "-c", command, "turngym-alfworld", *fixed, "--run.name", "test", *words],
        cwd=folder, env=os.environ, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = (folder / "outputs" / "test" / "traces.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def on_panel(folder: Path, panel: str) -> list[str]:
    """The words with which verifiers plays `panel` and adds its episodes to a trace in `folder`."""
    options = {"panel": panel, "max-turns": 12, "trace": folder / "trace.jsonl"}
    return [word for name, value in options.items() for word in (f"--env.taskset.{name}", str(value))]

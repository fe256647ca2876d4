"""`turngym trace view`: read any number of episodes in a browser, from files of any size."""

from __future__ import annotations

import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import tyro

from turngym.envs.core import TurngymError
from turngym.scripts.serve.draining import DrainingServer
from turngym.scripts.serve.fronts import trace_front
from turngym.scripts.traces.app import create_app
from turngym.scripts.traces.html import load_decoder
from turngym.scripts.traces.index import TraceIndex, index_trace

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Read episodes in the browser: a local server over an index of the files, which may be larger than memory."""

    files: tyro.conf.Positional[tuple[str, ...]]
    """Trace files, PATH or NAME=PATH; two of them are shown side by side on one task."""
    tokenizer: str | None = None
    """Folder or name of the tokenizer, to show the text of each token."""
    port: int = 8321
    """Port on this machine; 0 takes a free one. Only this machine can connect."""
    browser: bool = False
    """Open the page in a browser."""


def view(command: View) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    runs = open_runs(command.files)
    app = create_app(runs, None if command.tokenizer is None else load_decoder(command.tokenizer))
    server = DrainingServer(trace_front(app), host=HOST, port=command.port)
    server.stop_on_signals()
    print(f"ready: {server.url}, {sum(map(len, runs.values())):,} episodes; Ctrl-C ends it", flush=True)
    if command.browser:
        webbrowser.open(server.url)
    server.run()
    return 0


def open_runs(files: tuple[str, ...]) -> dict[str, TraceIndex]:
    """An index of each file by name. Raises TurngymError without files, or for two of one name."""
    if not files:
        raise TurngymError("no trace file was given; name one or more files of JSON lines")
    runs: dict[str, TraceIndex] = {}
    for spec in files:
        name, _, rest = spec.rpartition("=")
        path = Path(rest).expanduser()
        name = name or (path.parent.name if path.name == "trace.jsonl" else path.stem)
        if name in runs:
            raise TurngymError(f"two files are called {name!r}; tell them apart with NAME=PATH")
        runs[name] = index_trace(path, lambda count: print(f"{count:,} episodes indexed", file=sys.stderr))
        if runs[name].skipped:
            if not len(runs[name]):
                raise TurngymError(f"{path} is no trace: none of its {runs[name].skipped} lines is an episode")
            print(f"{path}: skipped {runs[name].skipped} lines that are no episodes", file=sys.stderr)
    return runs

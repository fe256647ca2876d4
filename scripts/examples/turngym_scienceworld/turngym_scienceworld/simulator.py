"""A process of ScienceWorld's simulator, which is a Java program, for one environment."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from typing import Any

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError

from turngym.core import EnvBackendError

JAVA_OPTIONS = ["-Xmx1g", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
"""A small process that starts quickly: a lab runs many of them beside each other."""

# what it logs is raised, too
logging.getLogger("py4j").setLevel(logging.CRITICAL)


class Simulator:
    """One Java process. It ends with `close`, with this object, and with the Python process.

    Every call raises EnvBackendError where the process cannot be started or does not answer.
    """

    def __init__(self, jar: Path) -> None:
        try:
            port, token, process = launch_gateway(
                classpath=str(jar),
                javaopts=JAVA_OPTIONS,
                die_on_exit=True,
                # without it everybody on this machine could run code in the process
                enable_auth=True,
                cwd=str(jar.parent),
                return_proc=True,
            )
        except FileNotFoundError as error:
            raise EnvBackendError("ScienceWorld's simulator needs `java`: install a Java runtime") from error
        except (OSError, ValueError, Py4JError) as error:
            raise EnvBackendError(f"{jar} cannot be started: {type(error).__name__}: {error}") from error
        gateway = JavaGateway(gateway_parameters=GatewayParameters(auto_field=True, port=port, auth_token=token))
        self.close: Callable[[], object] = weakref.finalize(self, _stop, gateway, process)
        self._server: Any = self._ask(lambda: gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface())

    def begin(self, task: str, variation: int, simplifications: str, *, with_gold: bool = False) -> str:
        """Begins a task and returns what is seen first. `with_gold` makes `gold` known, in up to half a minute."""
        self._ask(lambda: self._server.load(task, variation, simplifications, with_gold))
        self._ask(lambda: self._server.reset())
        return self.step("look around")

    def step(self, action: str) -> str:
        return str(self._ask(lambda: self._server.step(action)))

    def score(self) -> float:
        """The score so far, in hundredths; below 0 after a wrong focus, which loses the task."""
        return round(100 * float(self._ask(lambda: self._server.getScore()))) / 100

    def description(self) -> str:
        return str(self._ask(lambda: self._server.getTaskDescription()))

    def completed(self) -> bool:
        return bool(self._ask(lambda: self._server.getCompleted()))

    def valid(self) -> tuple[str, ...]:
        """The possible actions, up to thousands."""
        return tuple(map(str, self._ask(lambda: list(self._server.getValidActionObjectCombinations()))))

    def gold(self) -> tuple[str, ...]:
        """Actions that solve the task from its beginning."""
        return tuple(map(str, self._ask(lambda: list(self._server.getGoldActionSequence()))))

    def _ask(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except (Py4JError, OSError) as error:
            raise EnvBackendError(f"ScienceWorld's simulator failed: {type(error).__name__}: {error}") from error


def _stop(gateway: JavaGateway, process: Popen[bytes]) -> None:
    gateway.close()
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()

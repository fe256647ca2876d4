"""What goes wrong between this process and its workers, and exceptions that cross."""

from __future__ import annotations

import pickle
import traceback

from turngym.core.errors import AgentError


class ExecutorError(AgentError):
    """Workers that cannot be started, reached or sent what they need."""


class UnsendableError(ExecutorError):
    """An agent, an environment or a model that cannot be sent to another process."""


def picklable(error: Exception) -> Exception:
    """`error` with its traceback as a note, or a summary of it if it cannot be pickled."""
    trace = "".join(traceback.format_exception(error))
    error.add_note(f"in a worker:\n{trace}")
    try:
        # loaded as well, since exceptions whose __init__ takes other arguments can be dumped but not loaded
        pickle.loads(pickle.dumps(error))
    except Exception:
        return ExecutorError(f"{type(error).__name__} in a worker: {error}\n{trace}")
    return error

"""Errors of SGLang servers; the classes tell which may pass when tried again."""

from __future__ import annotations

from turngym.envs.core import TurngymError


class ServerError(TurngymError):
    """A server that cannot do what is asked of it: trying again does not help."""


class ServerDown(ServerError, ConnectionError):
    """A server that does not answer, or answers that it cannot just now: it may come back."""


class ServerTimeout(ServerError, TimeoutError):
    """The deadline has passed."""


class BadAnswer(ServerError, RuntimeError):
    """An answer that does not fit its request: too few log-probabilities, ids that do not belong together."""


class WrongWeights(ServerError, RuntimeError):
    """A server with other weights than it was last given: it was restarted, or another client changed them."""


class SyncError(ServerError):
    """New weights that did not arrive; which ones the server has now is in the text."""

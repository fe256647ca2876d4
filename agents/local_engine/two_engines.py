"""What the policies share in which a student and a teacher take part in one episode."""

from __future__ import annotations

from turngym.agents.agent import AgentError
from turngym.envs.protocols import Engine


class TwoEngines:
    """A student, a teacher, and the teacher's share of `what` (turns, ids). Raises AgentError outside [0, 1]."""

    def __init__(self, student: Engine, teacher: Engine, share: float, what: str) -> None:
        if not 0.0 <= share <= 1.0:
            raise AgentError(f"the teacher's share of the {what} is {share}; valid: 0 to 1")
        self._student, self._teacher, self.share = student, teacher, share

    @property
    def max_length(self) -> int:
        """Most ids of prompt and response together: what both hold."""
        return min(self._student.max_length, self._teacher.max_length)

    def weights_changed(self, version: int) -> None:
        """The student has new weights."""
        self._student.weights_changed(version)

    def release(self, session: str) -> None:
        self._student.release(session)
        self._teacher.release(session)

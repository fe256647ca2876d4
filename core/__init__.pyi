"""The public names of `turngym.core`; `__init__.py` imports each when first used, type checkers read this."""

from .episode import Episode as Episode
from .episode import EpisodeError as EpisodeError
from .episode import Status as Status
from .episode import TopK as TopK
from .episode import Turn as Turn
from .errors import EnvBackendError as EnvBackendError
from .errors import TaskError as TaskError
from .errors import TurngymError as TurngymError
from .protocols import GenerateRequest as GenerateRequest
from .protocols import Generation as Generation
from .protocols import Judge as Judge
from .protocols import JudgeRequest as JudgeRequest
from .protocols import Judgment as Judgment
from .protocols import Policy as Policy
from .protocols import Sampling as Sampling
from .protocols import Scorer as Scorer
from .rollout_request import RolloutRequest as RolloutRequest
from .task import Task as Task
from .task import ToolSpec as ToolSpec
from .task import Verdict as Verdict
from .task import content_hash as content_hash
from .trace import TraceError as TraceError
from .trace import TraceWriter as TraceWriter
from .trace import read_trace as read_trace

"""Options of demonstrations: who demonstrates, how it is asked, and which demonstrations count."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal

from turngym.agents.endpoint.client import EndpointOptions
from turngym.core.secrets import refuse_credentials
from turngym.core.settings import IN_FILE, Above0, Count, Length, Needs, SettingsError, Share, Signed, Threads


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationOptions:
    """Demonstrations for luffy, tcod b2f and sft."""

    demonstrations: str | None = None
    """Who demonstrates the step's tasks. `expert` or another player, `model:FOLDER`, `openai:MODEL`, an agent of yours
    as `package.module:name`, or a trace file, whose episodes are found by task. By default --expert."""
    demonstrated_tasks: bool = False
    """Play only demonstrated tasks. Of these the trace file has a demonstration that counts."""
    demonstration_success: bool = False
    """Leave out those that did not succeed."""
    demonstration_reward: Signed | None = None
    """Leave out those that are worth less. By --reward, else by their return."""
    demonstration_fits: bool = field(default=True, metadata=IN_FILE)
    """Leave out demonstrations that, in the student's tokens, are longer than its context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstratorOptions(EndpointOptions):
    """How a model that demonstrates is asked (--demonstrations model:FOLDER, openai:MODEL)."""

    temperature: float = 0.85
    """Sampling temperature; 0 is greedy."""
    channel: str = "auto"
    """How it writes actions, as `--channel` of `turngym rollout`."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Thinking switch of its chat template, or of the endpoint."""
    system: str | None = None
    """Its system message; by default as it was trained, else the environment's instructions."""
    max_new_tokens: Length | None = None
    """Most tokens of one response; by default as it was trained, else 512, at an endpoint 4096."""
    max_context: Length | None = None
    """Most tokens of an episode's history and response; by default what the model allows."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Precision of its weights."""

    @property
    def table(self) -> dict[str, Any]:
        """The settings of the agent, by their short names."""
        given = asdict(self)
        given["chat.channel"], given["chat.system"] = given.pop("channel"), given.pop("system")
        # what is not given is as the model was trained
        own = ("chat.system", "max_new_tokens", "max_context")
        return {name: value for name, value in given.items() if name not in own or value is not None}

    @property
    def identity(self) -> dict[str, Any]:
        """What draws other demonstrations, JSON-able."""
        free = {"base_url", "key_env", "request_deadline", "request_retries", "handshake"}
        free |= {"price_in", "price_cached", "price_out"}
        return {f"collect.demonstrator.{name}": value for name, value in asdict(self).items() if name not in free}


NO_MODELS = ("auto", "words", "rules", "expert", "attempts", "episode", "nothing")
"""Judges that come with turngym and ask no model; `skills:FOLDER` is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeOptions:
    """Who judges the turns of prm-rl and sage-opd, and what others tell a teacher about them."""

    judge: str = "auto"
    """Who judges. `rules` (verdicts and rewards of the environment), `expert` (plays each episode again and asks
    --expert, which by default sees the hidden state), `model:FOLDER`, the url of an OpenAI-compatible endpoint with its
    version (http://127.0.0.1:8000/v1; the key comes from TURNGYM_JUDGE_KEY), or a judge of yours as
    `package.module:name`. For hints alone: `skills:FOLDER` (texts by the kind of task; `skills:alfworld`, `webshop` and
    `search` come along), `attempts` (what another attempt of the group did that succeeded), `episode` (what the
    finished episode itself teaches), `nothing`. auto: rules where scores are asked for, else expert."""
    judge_strict: bool = False
    """Only the expert's own action is not bad. expert: a possible action that is not the expert's own scores -1, not
    0."""
    judge_repeats: Count | None = None
    """Most times in a row for one hint. expert: the same hint at most so many times in a row; by default as often as it
    applies."""
    judge_votes: Count = 3
    """Votes per turn of a model. Rules and experts have one."""
    judge_temperature: float = field(default=0.6, metadata=IN_FILE)
    """Sampling temperature of a judge model."""
    judge_max_tokens: Length = 1024
    """Most tokens of one vote."""
    judge_model: str = "default"
    """Name of the model behind a url."""
    judge_parallel: Threads = field(default=16, metadata=IN_FILE)
    """Votes that a judge behind a url is asked for at a time."""
    judge_timeout: Above0 = field(default=120.0, metadata=IN_FILE)
    """Seconds for one vote: of a judge behind a url from the first request to the last byte, with all attempts; of the
    expert for playing an episode again; of a judge of yours for each request on average."""
    judge_tries: Count = field(default=3, metadata=IN_FILE)
    """Attempts at a vote in a row; the proxy goes on asking later, other runs count a vote that failed so often."""
    judge_unread: Share = field(default=0.9, metadata=IN_FILE)
    """Stop when more than this share of the votes holds no valid box in three steps in a row; 1 never stops."""
    judge_every: int = field(default=10, metadata=IN_FILE)
    """Steps between those whose judged episodes are kept as traces in OUT/judged; 0 keeps none."""
    needs: ClassVar[Needs] = (
        (
            ("judge_votes", "judge_temperature", "judge_max_tokens"),
            "a model as --judge",
            lambda judging: not (judging.judge in NO_MODELS or judging.judge.startswith("skills:")),
        ),
        (("judge_model", "judge_parallel", "judge_tries"), "a url as --judge", lambda judging: "://" in judging.judge),
        (("judge_strict", "judge_repeats"), "--judge expert", lambda judging: judging.judge in ("auto", "expert")),
    )

    def __post_init__(self) -> None:
        refuse_credentials("judge", self.judge)
        if not 0.0 <= self.judge_unread <= 1.0:
            raise SettingsError(f"judge_unread is {self.judge_unread}; valid: a share, 0 to 1")
        for name in ("judge_votes", "judge_parallel", "judge_tries"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} is {getattr(self, name)}; valid: at least 1")
        if not self.judge_timeout > 0:
            raise SettingsError(f"judge_timeout is {self.judge_timeout}; valid: more than 0 seconds")

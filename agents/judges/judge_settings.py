"""Who judges turns, as settings: each kind of judge has those that it reads."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from turngym.agents.rendering.skills import SKILLS_PREFIX
from turngym.core.clean_keys import refuse_credentials
from turngym.core.nested import KIND
from turngym.core.numbers import Count, NotNegative, Number, Positive, Share
from turngym.core.spec import Spec


class JudgeSettings(Spec, tag_field=KIND):
    """Who judges the turns of an episode."""

    judge_unread: Share = 0.9
    """Stop when more than this share of the votes holds no valid box in three steps in a row; 1 never stops."""
    judge_every: Number = 10
    """Steps between those whose judged episodes are kept as traces in OUT/judged; 0 keeps none."""

    @classmethod
    def table_of(cls, text: str) -> dict[str, Any]:
        """`KIND`, `model:FOLDER`, `skills:FOLDER`, a url; another name is a judge of another package."""
        kind, colon, value = text.partition(":")
        if "://" in text:
            return {KIND: "url", "url": text}
        if text.startswith(SKILLS_PREFIX) or (kind == "model" and value):
            return {KIND: kind, "folder": value}
        if not colon and text in WITHOUT_MODEL:
            return {KIND: text}
        return {KIND: "own", "function": text}

    @property
    def name(self) -> str:
        """The judge's name on a command line: `rules`, `model:FOLDER`, a url."""
        if isinstance(self, UrlJudge):
            return self.url
        if isinstance(self, OwnJudge):
            return self.function
        kind = str(self.__struct_config__.tag)
        return f"{kind}:{self.folder}" if isinstance(self, ModelJudge | SkillsFolder) else kind


class AskedJudge(JudgeSettings):
    """A judge that is a model, or may be one."""

    judge_votes: Count = 3
    """Votes per turn."""
    judge_temperature: NotNegative = 0.6
    """Sampling temperature of a judge model."""
    judge_max_tokens: Count = 1024
    """Most tokens of one vote."""


class Replayed(JudgeSettings):
    """A judge that plays each episode again and asks an expert."""

    judge_strict: bool = False
    """Only the expert's own action is not bad: a possible action that is not the expert's own scores -1, not 0."""
    judge_repeats: Count | None = None
    """Most times in a row for one hint; none: as often as it applies."""
    judge_timeout: Positive = 120.0
    """Seconds in which an episode must have been played again."""


class Rules(JudgeSettings, tag="rules"):
    """Verdicts and rewards of the environment."""


class Expert(Replayed, tag="expert"):
    """The environment's expert (`expert`), which plays each episode again."""


class KeywordJudge(JudgeSettings, tag="words"):
    """Words of failure or thanks in the next message."""


class Attempts(JudgeSettings, tag="attempts"):
    """What another attempt of the group did that succeeded, as a hint."""


class EpisodeHints(JudgeSettings, tag="episode"):
    """What the finished episode itself teaches, as a hint."""


class Nothing(JudgeSettings, tag="nothing"):
    """No hint."""


class SkillsFolder(JudgeSettings, tag="skills", kw_only=True):
    """Texts by the kind of task, as hints."""

    folder: str
    """Their folder, or the name of one that comes along (alfworld, webshop, search)."""


class ModelJudge(AskedJudge, tag="model", kw_only=True):
    """A model that judges in this process."""

    folder: str
    """Its folder, or ORG/NAME[@REVISION], one of the hub."""


class UrlJudge(AskedJudge, tag="url", kw_only=True):
    """A model behind an OpenAI-compatible endpoint."""

    url: str
    """Its address with its version (http://127.0.0.1:8000/v1); the key comes from TURNGYM_JUDGE_KEY."""
    judge_model: str = "default"
    """Its name there."""
    judge_parallel: Annotated[int, Meta(ge=1, le=1024)] = 16
    """Votes that it is asked for at a time."""
    judge_timeout: Positive = 120.0
    """Seconds for one vote, from the first request to the last byte, with all attempts."""
    judge_tries: Count = 3
    """Attempts at a vote in a row; the proxy goes on asking later, other runs count a vote that failed so often."""

    def __post_init__(self) -> None:
        refuse_credentials("judge", self.url)


class OwnJudge(AskedJudge, tag="own", kw_only=True):
    """A judge of another package. It is built from these settings, whether it asks a model or not."""

    function: str
    """`package.module:name`, or the name of an entry point."""
    judge_timeout: Positive = 120.0
    """Seconds for each request, on average."""


AnyJudge = (
    Rules | Expert | KeywordJudge | Attempts | EpisodeHints | Nothing | SkillsFolder | ModelJudge | UrlJudge | OwnJudge
)
WITHOUT_MODEL = ("rules", "expert", "words", "attempts", "episode", "nothing")
"""Judges without a value."""

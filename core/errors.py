"""The errors that turngym raises on purpose, and the helpers that make their texts useful.

A text says what is wrong, which value it was, where it was, and what would be valid. `checked_int` and `checked_choice`
check what callers give, `full_disk` explains a full disk, `did_you_mean` names near valid values, also where another
library calls them otherwise.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import SequenceMatcher
from heapq import nlargest
from numbers import Integral
from pathlib import Path
from typing import TypeVar

from turngym.core.redaction import brief

T = TypeVar("T")


class TurngymError(Exception):
    """Base of every error that turngym raises on purpose."""


class SettingsError(TurngymError, ValueError):
    """A setting that does not exist, or that cannot have its value."""


class UnknownSettingError(SettingsError):
    """A setting that does not exist. `name` is what it was called."""

    def __init__(self, name: str, said: str) -> None:
        super().__init__(said)
        self.name = name


class TaskError(TurngymError):
    """A task does not exist, cannot be played, or is not the task that its hash promises."""


class EnvBackendError(TurngymError):
    """What an environment runs on failed (a dead server, a full disk). It is an episode status, not an action."""


class RetrievalError(TurngymError):
    """Passages cannot be read, indexed or searched, or a file or a model that this takes cannot be had."""


class AgentError(TurngymError):
    """An agent does not fit the environment that it is asked to play."""


class ModelError(AgentError):
    """A model cannot be loaded or used."""


def checked_int(
    name: str, value: object, least: int, *, none: str = "", error: type[TurngymError] = TurngymError
) -> int:
    """Returns `value` as an int of at least `least`; NumPy's integers are accepted, bools are not.

    Raises `error` otherwise, also for None: where None is allowed, the caller takes it out before.

    Args:
        none: what None means, for the error's text, such as "no limit"; empty where None is not allowed.
    """
    otherwise = f", or None for {none}" if none else ""
    # True is an Integral
    if isinstance(value, bool) or not isinstance(value, Integral):
        example = f", such as {least}" if isinstance(value, str) else ""
        raise error(f"{name} is {brief(value, 80)}; it must be a whole number{example}{otherwise}")
    if value < least:
        raise error(f"{name} is {brief(value, 80)}; it must be at least {least}{otherwise}")
    return int(value)


def checked_choice(name: str, value: object, choices: Iterable[T], error: type[TurngymError] = TurngymError) -> T:
    """Returns the one of `choices` that equals `value`. Raises `error`, which lists them, if none does."""
    valid = list(choices)
    for choice in valid:
        if choice == value:
            return choice
    names = [str(choice) for choice in valid]
    raise error(f"{name} is {value!r}; valid: {', '.join(names)}.{did_you_mean(str(value), names)}")


# EFBIG is what a limit on the size of files (ulimit -f) gives
_DISK_FULL_CODES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
# safetensors and torch.save raise errors of their own, which have a text but no error number
_DISK_FULL_TEXTS = (
    *("no space left", "disk quota", "file too large", "failed writing file", "unexpected pos", "os error 28"),
)


@contextmanager
def full_disk(
    path: Path,
    what: str,
    kind: type[TurngymError] = TurngymError,
    *,
    then: str = "Make room and continue with --resume",
) -> Iterator[None]:
    """Turns a failure to write `what` under `path` because the disk is full into one error of class `kind`.

    Other errors pass unchanged.

    Args:
        path: folder that is written to; the error names it, with the room left on its disk.
        what: noun for what is written, as in "the `what` could not be written".
        then: last sentence of the error: what the user can do.
    """
    try:
        yield
    except Exception as error:
        if not is_disk_full(error):
            raise
        free = shutil.disk_usage(path).free / 2**20 if path.exists() else 0.0
        raise kind(
            f"no room left under {path} ({free:,.1f} MiB are free, unless a quota allows less): the {what} could not "
            f"be written and nothing half-written was kept; what was there before is whole. {then}"
        ) from error


def not_written(what: str, folder: Path, error: OSError) -> str:
    """Says why `what` could not be written into a `folder` for temporary files, and names the remedy if the disk is
    full."""
    why = error.strerror or str(error)
    if is_disk_full(error):
        return f"there is no room for {what} in {folder}: {why}; make room, or set TMPDIR to a folder that has it"
    return f"{what} cannot be written in {folder}: {why}; set TMPDIR to a folder that can be written"


def is_disk_full(error: BaseException) -> bool:
    """Whether `error`, or an error that caused it, says that a disk or a quota is full."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL_CODES:
            return True
        if any(text in str(cause).lower() for text in _DISK_FULL_TEXTS):
            return True
        # a library's own error often has the system's behind it
        cause = cause.__cause__ or cause.__context__
    return False


# These bound the work of `nearest`, for difflib takes quadratic time and every trigram is sought in every candidate.
_MAX_GRAMS = 100
_MAX_CHARS = 200
_FINALISTS = 16
_SMALL = 300
"""Up to this many candidates are all compared: a short word with a typo may share no trigram with what was meant."""


def nearest(query: str, candidates: Iterable[str], n: int = 1, cutoff: float = 0.4) -> list[str]:
    """The up to `n` candidates most like `query`, best first; equally good ones keep the candidates' order.

    It is quick enough for lists of 100,000 ids: in long lists, the number of shared trigrams chooses the few that
    difflib compares.

    Args:
        query: what was written; case is ignored, and so is what follows its first 200 characters.
        cutoff: least similarity by difflib's ratio, 0 to 1 (equal but for case).
    """
    query = query[:_MAX_CHARS].casefold()
    pool = list(candidates)
    if len(pool) > _SMALL:
        size = min(3, max(1, len(query)))
        # sorted, because the order of a set of str differs between processes and the stride below picks from it
        grams = sorted({query[start : start + size] for start in range(max(1, len(query) - size + 1))})
        # spread over a long query, instead of only its beginning
        grams = grams[:: -(-len(grams) // _MAX_GRAMS)]
        shared = ((sum(gram in text.casefold() for gram in grams), -index) for index, text in enumerate(pool))
        pool = [pool[-negative] for _, negative in nlargest(_FINALISTS, shared)]
    # from 200 characters on, autojunk would ignore common letters
    matcher = SequenceMatcher(autojunk=False)
    # difflib indexes its second sequence and keeps that while the first one changes
    matcher.set_seq2(query)
    best: list[tuple[float, int, str]] = []
    for index, text in enumerate(pool):
        matcher.set_seq1(text[:_MAX_CHARS].casefold())
        # the quick ratios are upper bounds: most candidates never need the slow one
        floor = max(cutoff, best[-1][0]) if len(best) == n else cutoff
        if matcher.real_quick_ratio() >= floor and matcher.quick_ratio() >= floor and matcher.ratio() >= floor:
            best = nlargest(n, [*best, (matcher.ratio(), -index, text)])
    return [text for _, _, text in best]


FIELD_NAMES: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate",), ("lr",)),
    **dict.fromkeys(("group_size", "num_generations", "rollouts_per_prompt", "num_samples"), ("n", "samples")),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size"), ("episodes", "slots")),
    **dict.fromkeys(("per_device_train_batch_size", "mini_batch_size", "micro_batch_size"), ("micro_tokens",)),
    **dict.fromkeys(("beta", "kl_beta", "kl_coefficient", "init_kl_coef"), ("kl_coef",)),
    **dict.fromkeys(("max_steps", "total_steps", "num_steps", "num_train_steps"), ("steps",)),
    **dict.fromkeys(("model", "model_name_or_path", "base_model", "policy"), ("student", "agent")),
    **dict.fromkeys(("output_dir", "output", "save_dir"), ("out",)),
    **dict.fromkeys(("max_tokens", "max_response_length", "max_completion_length"), ("max_new_tokens",)),
    **dict.fromkeys(("max_length", "max_model_len", "max_seq_length", "context_length"), ("max_context",)),
    **dict.fromkeys(("warmup", "warmup_steps", "warmup_ratio"), ("lr_warmup",)),
    **dict.fromkeys(("lora_r", "lora_rank"), ("lora.rank",)),
    **dict.fromkeys(("horizon", "max_episode_steps", "turns"), ("max_turns",)),
    **dict.fromkeys(("num_tasks", "num_episodes"), ("tasks", "limit")),
    **dict.fromkeys(("api_base", "endpoint", "url"), ("base_url",)),
}
"""What other libraries call a setting -> our last names for it, in the order in which they are sought."""


def known_as(query: str, candidates: Iterable[str]) -> list[str]:
    """The candidates that mean what `query` does: of the same last name (`--kl-coef`, `grpo.kl_coef`), or of a name
    that `FIELD_NAMES` has for it."""
    paths = {text: text.lstrip("-").replace("-", "_").casefold() for text in candidates}
    asked = query.lstrip("-").replace("-", "_").casefold()
    names = [asked, *FIELD_NAMES.get(asked, ())]
    matches = [text for name in names for text, path in paths.items() if name in (path, path.rpartition(".")[2])]
    return list(dict.fromkeys(matches))


def first_few(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many there are besides: a line stays a line."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(query: str, candidates: Iterable[str], n: int = 3, cutoff: float = 0.4) -> str:
    """The end of an error text: ` Did you mean 'a' or 'b'?`, or an empty text if no candidate is near.

    Candidates that `known_as` finds replace those that are only spelled alike.
    """
    pool = list(candidates)
    near = known_as(query, pool)[:n] or nearest(query, pool, n, cutoff)
    return " Did you mean " + " or ".join(repr(text) for text in near) + "?" if near else ""

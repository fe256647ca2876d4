"""Models of the Hugging Face hub by name: the one door through which turngym asks it.

    model_folder("Qwen/Qwen2.5-1.5B-Instruct")            the folder in the hub's own cache, fetched if it is not there
    model_folder("Qwen/Qwen2.5-1.5B-Instruct@989aa79")    the same at a revision: a branch, a tag, a commit
    model_folder("runs/student/model")                    a folder is a folder

What the cache has is taken from there, and nobody is asked. Else the commit is looked up, one line says what is fetched
and how large it is, and the files of that commit are fetched: configuration, tokenizer, and weights as safetensors. No
other form of weights is taken, and no code. `TURNGYM_OFFLINE=1` (or `HF_HUB_OFFLINE=1`) never asks. `HF_ENDPOINT` names
a mirror.
"""

from __future__ import annotations

import os
import re
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from turngym.core.errors import ModelError, RetrievalError
from turngym.core.model_folder_check import TEMPLATES, check_model_files
from turngym.core.redaction import brief, excerpt, redacted
from turngym.core.user_files import json_object, user_path

HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?:@(?P<revision>[\w./-]{1,200}))?")
OFFLINE = ("TURNGYM_OFFLINE", "HF_HUB_OFFLINE")
COMMIT = re.compile(r"[0-9a-f]{40}")
MOST_FILES = 1000
"""Files of a model at most."""
INDEX = "model.safetensors.index.json"
POOLING = "1_Pooling/config.json"
"""Where the folder of an encoder of sentence-transformers says how states become one vector."""
CONFIG_FILES = re.compile(rf"[\w.-]+\.(?:json|jinja|txt|model|tiktoken)|{TEMPLATES}/[\w.-]+\.jinja|{POOLING}")
"""Names of the configuration's and the tokenizer's files."""
WEIGHTS = re.compile(r"(?!consolidated)[\w.-]+\.safetensors")


class HubError(RetrievalError):
    """A model cannot be had from the hub; the message says what to do by hand."""


def is_hub_name(named: str | os.PathLike[str]) -> bool:
    """Whether `named` is ORG/NAME, with or without @REVISION, and nothing on this machine."""
    text, path = os.fspath(named), user_path(named)
    match = HUB_NAME.fullmatch(text)
    # ORG/NAME beside an existing folder ORG is a path with a mistake in it
    return match is not None and not path.exists() and not path.parent.is_dir()


def model_folder(named: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The folder of the model that `named` stands for: a path as it is, a hub name in the hub's cache.

    Without `weights` only configuration and tokenizer are needed.

    Raises HubError for a hub name that cannot be had, and for a folder that `check_model_files` refuses.
    """
    folder = _folder(os.fspath(named), weights) if is_hub_name(named) else user_path(named)
    try:
        if folder.is_dir():
            check_model_files(folder)
    except ModelError as error:
        raise HubError(str(error)) from None
    return folder


def cached_folder(named: str) -> Path | None:
    """The folder in the hub's cache of a model that a file names; None if it is no hub name, or the cache lacks a part
    of it.

    Nothing is fetched: what is downloaded is the user's word, not a file's.
    """
    if not is_hub_name(named) or (match := HUB_NAME.fullmatch(named)) is None:
        return None
    try:
        import huggingface_hub as hub
    except ImportError:
        return None
    return _cached(hub, match["repo"], match["revision"] or "main", True)


def pinned(folder: str | os.PathLike[str]) -> str | None:
    """`ORG/NAME@COMMIT` of a folder in the hub's cache; None for any other folder."""
    path = Path(folder)
    if path.parent.name != "snapshots" or not path.parent.parent.name.startswith("models--"):
        return None
    return f"{path.parent.parent.name.removeprefix('models--').replace('--', '/', 1)}@{path.name}"


@lru_cache
def _folder(named: str, weights: bool) -> Path:
    match = HUB_NAME.fullmatch(named)
    assert match is not None
    repo, revision = match["repo"], match["revision"] or "main"
    by_hand = f"get it where there is a network (`hf download {repo} --local-dir FOLDER`) and name the folder"
    try:
        import huggingface_hub as hub
    except ImportError as error:
        raise HubError(
            f"there is no folder {named}; to get models from the hub: pip install 'turngym[hub]' ({error})"
        ) from error
    if (folder := _cached(hub, repo, revision, weights)) is not None:
        print(f"turngym: {pinned(folder)} from the cache", file=sys.stderr)
        return folder
    if off := next((name for name in OFFLINE if os.environ.get(name, "0").lower() not in ("", "0", "false")), None):
        raise HubError(f"{named} is no folder and not whole in the hub's cache, and ${off} is set: {by_hand}")
    commit, sizes = _listed(hub, repo, revision, named, by_hand)
    needed = [name for name in sizes if weights or not WEIGHTS.fullmatch(name)]
    if weights and not any(WEIGHTS.fullmatch(name) for name in needed):
        raise HubError(f"{named}: the hub has no weights of it as safetensors; no other form is taken")
    total = sum(sizes[name] for name in needed)
    where = redacted(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    print(f"turngym: fetching {repo}@{commit}, {len(needed)} files, {_size(total)}, from {where}", file=sys.stderr)
    try:
        # the configuration last: what has it is whole
        for name in sorted(needed, key=lambda name: name == "config.json"):
            file = hub.hf_hub_download(repo, name, revision=commit)
    except Exception as error:  # of the network, the disk, a changed file: whatever the library raises
        raise HubError(
            f"{named} could not be fetched ({_first_line(error)}); the next try goes on; or {by_hand}"
        ) from None
    _remember(hub, repo, revision, commit)
    return Path(file).parent


def _listed(hub: Any, repo: str, revision: str, named: str, by_hand: str) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and the size in bytes of each file that is taken of it."""
    try:
        info = hub.HfApi().model_info(repo, revision=revision, files_metadata=True, timeout=30)
    except Exception as error:
        # an answer is the hub's word on the name; without one nothing is known of it
        answered = getattr(error, "response", None) is not None
        outcome = "gives no such model" if answered else "cannot be reached"
        raise HubError(
            f"there is no folder {named}, and the hub {outcome} ({_first_line(error)}): check the name, or {by_hand}"
        ) from None
    commit, files = str(info.sha), info.siblings or []
    if COMMIT.fullmatch(commit) is None or len(files) > MOST_FILES:
        raise HubError(f"{named}: the hub's answer cannot be: commit {brief(commit, 60)}, {len(files)} files")
    sizes = {file.rfilename: int(file.size or 0) for file in files}
    taken = [name for name in sizes if CONFIG_FILES.fullmatch(name) or WEIGHTS.fullmatch(name)]
    return commit, {name: sizes[name] for name in taken}


def _cached(hub: Any, repo: str, revision: str, weights: bool) -> Path | None:
    """The snapshot of a revision, if all that is needed is in the cache."""
    file = hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    if not isinstance(file, str):
        return None
    folder = Path(file).parent
    if not any((folder / name).is_file() for name in ("tokenizer_config.json", "tokenizer.json")):
        return None
    return folder if not weights or _whole(folder) else None


def _whole(folder: Path) -> bool:
    """Whether all weights of a model are in its folder."""
    index = folder / INDEX
    if not index.is_file():
        return any(WEIGHTS.fullmatch(path.name) for path in folder.iterdir())
    try:
        shards = json_object(index, HubError)["weight_map"].values()
        return all((folder / str(name)).is_file() for name in shards)
    except (HubError, KeyError, AttributeError):
        return False


def _remember(hub: Any, repo: str, revision: str, commit: str) -> None:
    """Keeps which commit a branch or a tag was, as the hub's own library does, so that the cache finds it by name."""
    if revision == commit:
        return
    ref = Path(hub.constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}" / "refs" / revision
    # a revision is a stranger's text only where a user typed it; it must not leave the folder all the same
    if ".." not in revision.split("/"):
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit, encoding="utf-8")


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _first_line(error: BaseException) -> str:
    """Returns one line of an exception's text. transformers explains at length, and its first line names the cause."""
    first, *others = [part.strip() for part in str(error).strip().splitlines()] or [""]
    line = f"{first} {others[0]}" if others and first.endswith(":") else first
    # the text of some is a key or a type alone
    alone = not line or isinstance(error, LookupError | AttributeError | TypeError)
    return excerpt(f"{type(error).__name__}: {line}" if alone else line, 300)


def load_problem(error: Exception) -> str:
    """Says in one line why transformers could not load a folder. A folder that needs its own code is named as such.

    Whoever loads passes `trust_remote_code=False`: else transformers asks on standard input, and runs the code where a
    `y` comes from a pipe.
    """
    if "trust_remote_code" in str(error):
        return (
            "it brings code of its own (auto_map in its configuration), which is never run here; a program that "
            "runs it (vllm serve --trust-remote-code) can serve it"
        )
    return _first_line(error)

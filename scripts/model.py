"""Make a model folder of a GGUF file, or verify that every file of a model, checkpoint or run is as it was written.

Examples:
    turngym model import SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2
    turngym model verify runs/turnopd
    turngym model verify runs/turnopd/checkpoints/step_000100/model
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from turngym.agents.gguf_model import import_gguf
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.files import FILE, ChangedFileError, changed_files, read_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """Write the model of a GGUF file as a folder for --agent, --student and --teacher: float32 weights, tokenizer."""

    file: tyro.conf.Positional[Path]
    """A GGUF file of the Llama, Qwen2 or Qwen3 family."""
    out: Path
    """The new folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Compare every file with its checksum, whatever its size; status 1 if any differs."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """Model folders, checkpoints, or folders that hold some, such as a run."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym model` with `argv` (without the verb itself)."""
    description = (__doc__ or "").split("\n")[0]
    command = tyro.extras.subcommand_cli_from_dict(
        {"import": Import, "verify": Verify}, args=list(argv), prog="turngym model", description=description
    )
    if isinstance(command, Import):
        out = import_gguf(command.file, command.out)
        print(f"{out}: use it as --agent model:{out} or --student {out}")
        return 0
    if not command.folders:
        raise TurngymError("name one or more folders: turngym model verify FOLDER")
    return max(_verify(folder) for folder in command.folders)


def _verify(folder: Path) -> int:
    if not folder.is_dir():
        raise TurngymError(f"there is no folder {folder}")
    sealed = sorted(path.parent for path in folder.rglob(FILE))
    if not sealed:
        raise TurngymError(
            f"{folder} holds no {FILE}, so nothing says how its files were written: models of other programs and of "
            "older versions have none"
        )
    files, problems = 0, list[str]()
    for place in sealed:
        try:
            files += len(read_sums(place))
            problems += [f"{place}: {problem}" for problem in changed_files(place)]
        except ChangedFileError as error:
            problems.append(str(error))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    print(
        f"{folder}: {len(problems)} of {files} files differ" if problems else f"{folder}: all {files} files are whole"
    )
    return 1 if problems else 0

"""Make a model folder of a GGUF file, a LoRA adapter or the mean of checkpoints, or verify that files are as written.

Examples:
    turngym model import SmolLM2-135M-Instruct.Q4_1.gguf --out models/smollm2
    turngym model merge runs/lora/checkpoints/step_000100/model --out models/student
    turngym model average runs/turnopd --last 4
    turngym model verify runs/turnopd
    turngym model verify runs/turnopd/checkpoints/step_000100/model
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.evaluation.play_panel import EvalResult
from turngym.agents.evaluation.results import AVERAGE
from turngym.agents.gguf_model import import_gguf
from turngym.agents.models import ADAPTER, base_model, find_model, lineage, load_model, merge_adapter
from turngym.agents.play_spec import Model
from turngym.agents.saved_model import companions, save_model, write_companions
from turngym.core.errors import ModelError, TurngymError
from turngym.core.files import SUMS_FILE, ChangedFileError, changed_sums, new_folder, read_sums, write_sums
from turngym.core.numbers import Million
from turngym.core.setting import Positional
from turngym.core.spec import Spec, changed
from turngym.scripts.options import run_verb


class Import(Spec):
    """Write the model of a GGUF file as a folder for --agent, --student and --teacher: float32 weights, tokenizer."""

    file: Positional[Path]
    """A GGUF file of the Llama, Qwen2 or Qwen3 family."""
    out: Path
    """The new folder."""


class Merge(Spec):
    """Write a LoRA adapter and its base as one ordinary model, for servers and for copies that stand alone."""

    adapter: Positional[Path]
    """Folder of the adapter: the model of a checkpoint that was trained with --lora.rank, or another of peft's."""
    out: Path
    """The new folder."""
    base: Path | None = None
    """The model that it was trained on; by default where the adapter says."""


class Average(Spec):
    """Write the mean of the weights of a run's last checkpoints to RUN/average/model, and let it play the run's last
    evaluation into RUN/average; `turngym report` shows it beside the run. Train with --keep-checkpoints 4 for it."""

    run: Positional[Path]
    """Folder of a training run."""
    last: Million = 4
    """Checkpoints whose weights count alike."""
    evaluate: bool = True
    """Play; --no-evaluate only writes the model."""


class Verify(Spec):
    """Compare every file with its checksum, whatever its size; status 1 if any differs."""

    folders: Positional[tuple[Path, ...]]
    """Model folders, checkpoints, or folders that hold some, such as a run."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym model` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {Import: _import, Merge: _merge, Average: _average, Verify: _verify_all}
    return run_verb(verbs, argv, prog="turngym model", about=__doc__)


def _import(command: Import) -> int:
    return _made(import_gguf(command.file, command.out))


def _merge(command: Merge) -> int:
    merge(command.adapter, command.out, base=command.base)
    return _made(command.out)


def _average(command: Average) -> int:
    model = average(command.run, last=command.last)
    if command.evaluate:
        print(evaluate_average(command.run))
    return _made(model)


def _made(folder: Path) -> int:
    print(f"{folder}: use it as --agent model:{folder} or --student {folder}")
    return 0


def _verify_all(command: Verify) -> int:
    return max(_verify(folder) for folder in command.folders)


def merge(adapter: Path, out: Path, *, base: Path | None = None) -> None:
    """Write the model of `adapter` and `base` (by default the one that the adapter names) to the new folder `out`.

    Tokenizer, template and chat settings are the adapter's where it has them, else the base's. Raises ModelError.
    """
    if not (adapter / ADAPTER).is_file():
        raise ModelError(f"{adapter} holds no LoRA adapter: {ADAPTER} is not there")
    if out.exists():
        raise ModelError(f"{out} is there already; name a new folder")
    source = base_model(adapter) if base is None else find_model(base)
    assert source is not None  # there is an adapter
    model = load_model(source)
    merge_adapter(model, adapter)
    _write(model, out, *lineage(source), adapter)


def _write(model: Any, out: Path, *folders: Path) -> None:
    """Write `model` to the new folder `out`, with what stands beside the weights in `folders`."""
    with new_folder(out) as unfinished:
        save_model(model, unfinished)
        write_companions(companions(*folders), unfinished)
        write_sums(unfinished)


def average(run: Path, *, last: int = 4) -> Path:
    """Write the mean of the weights of the `last` newest checkpoints of `run` and return its folder, RUN/average/model.

    Adapters are averaged as the models that they make. Raises TurngymError where there are fewer checkpoints, and
    ModelError where the folder is there already.
    """
    import torch

    from turngym.trainers.checkpoint import MODEL, list_checkpoints

    checkpoints, out = list_checkpoints(run), run / AVERAGE / MODEL
    if last < 2:
        raise TurngymError(f"--last is {last}; valid: at least 2")
    if len(checkpoints) < last:
        have = f"{run} has {len(checkpoints)} checkpoints"
        raise TurngymError(f"{have}; train with --keep-checkpoints {last} to average {last}")
    if out.exists():
        raise ModelError(f"{out} is there already; remove it to average anew")
    folders = [checkpoint / MODEL for checkpoint in checkpoints[-last:]]
    model = load_model(folders[-1])
    with torch.no_grad():
        for count, folder in enumerate(folders[:-1], start=2):
            weights = dict(load_model(folder).named_parameters())
            # a running mean, which needs two models in memory; tied weights are named once
            for name, weight in model.named_parameters():
                weight.lerp_(weights[name], 1 / count)
    _write(model, out, *lineage(folders[-1]))
    return out


def evaluate_average(run: Path) -> EvalResult:
    """Let RUN/average/model play what the last evaluation of `run` played, into RUN/average. Raises TurngymError where
    the run was not evaluated on a panel."""
    from turngym.trainers.checkpoint import MODEL

    traces = sorted((run / "eval").glob("step_*.jsonl"))
    if not traces:
        raise TurngymError(f"{run} has no evaluation to play again (eval/step_*.jsonl); --no-evaluate only averages")
    out = run / AVERAGE
    spec = rescore(traces[-1]).spec
    # the student, as it was evaluated, with other weights
    assert isinstance(spec.agent, Model)
    return evaluate(changed(spec, agent=changed(spec.agent, folder=str(out / MODEL), weights="")), out=out)


def _verify(folder: Path) -> int:
    if not folder.is_dir():
        raise TurngymError(f"there is no folder {folder}")
    sealed = sorted(path.parent for path in folder.rglob(SUMS_FILE))
    if not sealed:
        raise TurngymError(
            f"{folder} holds no {SUMS_FILE}, so nothing says how its files were written: models of other programs and "
            "of older versions have none"
        )
    files, problems = 0, list[str]()
    for sealed_folder in sealed:
        try:
            files += len(read_sums(sealed_folder))
            problems += [f"{sealed_folder}: {problem}" for problem in changed_sums(sealed_folder)]
        except ChangedFileError as error:
            problems.append(str(error))
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    verdict = f"{len(problems)} of {files} files differ" if problems else f"all {files} files are whole"
    print(f"{folder}: {verdict}")
    return 1 if problems else 0

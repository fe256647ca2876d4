"""A recipe as command lines: servers, torchrun, evaluation; and the same path with tiny models."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from turngym.scripts.study.recipe.runs import Method, PaperRun

POLICY, TEACHER, JUDGE, TRAIN = "POLICY_HOST", "TEACHER_HOST", "JUDGE_HOST", "TRAIN_HOST"
PLAY, SCORE, JUDGES, TEXT = "$PLAY", "$SCORE", "$JUDGES", "$TEXT"
"""Addresses of the servers, and the files of L_PT, as the script's head sets them."""
PORT = 30000


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command, and on which machines it runs."""

    where: str
    words: tuple[str, ...]
    why: str
    loop: bool = False
    """Once for each GPU N of the machine, beside each other."""

    @property
    def out(self) -> str:
        """The folder that it writes into; empty where it is not told one."""
        return self.words[self.words.index("--out") + 1] if "--out" in self.words else ""

    @property
    def line(self) -> str:
        # `$NAME` is the shell's to fill in, and must not be quoted away
        said = " ".join(word if word.startswith("$") else shlex.quote(word) for word in self.words)
        return f"for N in 0 1 2 3 4 5 6 7; do CUDA_VISIBLE_DEVICES=$N {said} & done" if self.loop else said


def paper_steps(run: PaperRun, out: str) -> list[Step]:
    """Everything from the hub's models to the evaluations, in order."""
    student, teacher = f"{out}/models/student", f"{out}/models/teacher"
    steps = [_download(run.student, student, "the student's weights"), *_helpers(run, out)]
    for method in run.methods:
        made = f"{out}/{method.name}/checkpoints/step_000100/model"
        words = [*_common(run), *method.words, "--student", student, "--out", f"{out}/{method.name}"]
        words += ["--policy-server", PLAY, "--panel", run.panel]
        words += ["--teacher", teacher, "--teacher-server", SCORE] if method.teacher else []
        words += ["--judge", JUDGES, *method.judge] if method.judge else []
        words += ["--lm-loss.files", TEXT] if method.text else []
        steps += [
            _serve(POLICY, student, f"8 servers that play for {method.name}; end them after it"),
            Step(
                where="2 machines x 8",
                words=_torchrun(2, method.algorithm, words),
                why=f"100 steps of {method.name}",
            ),
            _serve(POLICY, made, f"8 servers of what {method.name} made"),
            Step(where="anywhere", words=_evaluate(run, out, method), why="Avg@4, divided among 16 processes"),
        ]
    return steps


def _helpers(run: PaperRun, out: str) -> list[Step]:
    """Who teaches or judges: a teacher is made by GRPO first."""
    base, teacher = f"{out}/models/base", f"{out}/models/teacher"
    if run.has_judge:
        judge = f"{out}/models/judge"
        # a judge has one address
        words = (
            "turngym",
            "serve",
            "policy",
            judge,
            "--host",
            "0.0.0.0",
            "--port",
            str(PORT),
            "--tensor-parallel",
            "4",
        )
        served = Step(where=JUDGE, words=words, why="one server, on 4 GPUs, that judges")
        return [_download(run.teacher, judge, "the judge's weights"), served]
    if not run.has_teacher:
        return []
    grpo = [*_common(run), "--student", base, "--out", f"{out}/grpo", "--policy-server", PLAY, "--steps", "150"]
    return [
        _download(run.teacher, base, "the teacher's weights"),
        _serve(POLICY, base, "8 servers that play for the teacher's own training; end them after it"),
        Step(where="3 machines x 8", words=_torchrun(3, "grpo", grpo), why="GRPO makes the teacher"),
        Step(
            where="anywhere",
            words=("cp", "-r", f"{out}/grpo/checkpoints/step_000150/model", teacher),
            why="its last checkpoint teaches",
        ),
        _serve(TEACHER, teacher, "8 servers that score for the teacher", "--no-seeds"),
    ]


def _download(model: str, folder: str, why: str) -> Step:
    return Step(where="anywhere", words=("hf", "download", model, "--local-dir", folder), why=why)


def _serve(host: str, model: str, why: str, *more: str) -> Step:
    words = ("turngym", "serve", "policy", model, "--host", "0.0.0.0", "--port", f"$(({PORT}+N))", *more)
    return Step(where=host, words=words, why=why, loop=True)


def addresses(name: str, host: str) -> str:
    """The line that sets `name` to the addresses of a machine's eight servers."""
    return f"{name}=" + ",".join(f"http://${host}:{PORT + n}" for n in range(8))


def _torchrun(machines: int, algorithm: str, words: list[str]) -> tuple[str, ...]:
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"${TRAIN}:29500")
    group = ("torchrun", "--nnodes", str(machines), "--nproc-per-node", "8", *rendezvous)
    return (*group, "-m", "turngym", "train", "--algorithm", algorithm, *words)


def _common(run: PaperRun) -> list[str]:
    """What all trainings share; what Table 7 of TurnOPD says is the default and not repeated."""
    words = ["--env", run.env, "--split", run.env_kwargs["split"], "--max-turns", str(run.max_turns)]
    more = {name: value for name, value in run.env_kwargs.items() if name != "split"}
    words += ["--env-kwargs", json.dumps(more)] if more else []
    words += ["--channel", "tool", "--thinking", "on", "--autocast", "bfloat16", "--gradient-checkpointing"]
    return [*words, "--teacher-dtype", "bfloat16", "--weight-sync", "disk"]


def _evaluate(run: PaperRun, out: str, method: Method) -> tuple[str, ...]:
    model = f"{out}/{method.name}/checkpoints/step_000100/model"
    words = ["turngym", "eval", "--panel", run.panel, "--agent", f"model:{model}", "--samples", "4"]
    words += ["--temperature", "0.85", "--max-turns", str(run.max_turns), "--channel", "tool", "--thinking", "on"]
    return (*words, "--policy-server", PLAY, "--workers", "16", "--out", f"{out}/{method.name}/final")


def render(run: PaperRun, steps: list[Step]) -> str:
    """A shell script to read: each command under what it is for and where it runs."""
    role = "judged by" if run.has_judge else "learns from" if run.has_teacher else ""
    who = f"{run.student} {role} {run.teacher}" if role else run.student
    hosts = [POLICY, *([TEACHER] if run.has_teacher else []), *([JUDGE] if run.has_judge else []), TRAIN]
    head = [f"# {run.name} ({run.paper}): {who}, on at most 4 machines with 8 GPUs each.", *run.notes]
    head += [f"# Set {', '.join(hosts)} to host names, TURNGYM_SERVER_KEY everywhere, and --out on a shared disk."]
    head += ["# None of these commands has been run at this size; --embedded runs the same path with tiny models."]
    head += ["", addresses(PLAY[1:], POLICY)]
    head += [addresses(SCORE[1:], TEACHER)] if run.has_teacher else []
    judge = (f"{JUDGES[1:]}=http://${JUDGE}:{PORT}/v1", "export TURNGYM_JUDGE_KEY=$TURNGYM_SERVER_KEY")
    head += judge if run.has_judge else []
    head += [f"{TEXT[1:]}=pretraining.txt  # what L_PT reads"] if run.has_text else []
    return "\n".join([*head, *(line for step in steps for line in ("", f"# {step.where}: {step.why}", step.line))])


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """What the same path needs in the embedded world."""

    words: tuple[str, ...]
    """The world's own training options."""
    student: str
    base: str
    """What the teacher is made from."""
    panel: str
    steps: int
    out: str

    @property
    def text(self) -> str:
        """File that L_PT reads: what the world's expert sees and does."""
        return f"{self.out}/text.txt"


def embedded_steps(run: PaperRun, here: Embedded) -> list[Step]:
    """The same path in the embedded world, on this machine: GRPO, every method under torchrun, evaluation."""
    last = f"checkpoints/step_{here.steps:06d}/model"
    common = [*here.words, "--steps", str(here.steps), "--eval-every", "0", "--no-tensorboard"]
    planned = []
    if run.has_teacher:
        words = [*common, "--student", here.base, "--out", f"{here.out}/grpo"]
        planned.append(_local("grpo", words, "GRPO makes the teacher"))
    for method in run.methods:
        folder = f"{here.out}/{method.name}"
        words = [*common, *method.words, *method.embedded, "--student", here.student, "--out", folder]
        words += ["--teacher", f"{here.out}/grpo/{last}"] if method.teacher else []
        words += ["--lm-loss.files", here.text, "--lm-loss.coef", "0.01"] if method.text else []
        planned.append(_local(method.algorithm, words, f"{here.steps} steps of {method.name}"))
        told = ("turngym", "eval", "--panel", here.panel, "--agent", f"model:{folder}/{last}", "--samples", "4")
        planned.append(
            Step(
                where="here",
                words=(*told, "--limit", "8", "--threads", "1", "--workers", "2", "--out", f"{folder}/final"),
                why="Avg@4, divided among 2 processes",
            )
        )
    return planned


def _local(algorithm: str, words: list[str], why: str) -> Step:
    group = ("torchrun", "--standalone", "--nproc-per-node", "2", "-m", "turngym", "train")
    return Step(where="here", words=(*group, "--algorithm", algorithm, *words), why=why)

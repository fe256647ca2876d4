"""What the quickstart ends with: a table, figures, a page on which episodes can be read, and a closing sentence."""

from __future__ import annotations

from pathlib import Path

from turngym.scripts.quickstart.plan import Plan


def write_report(plan: Plan) -> None:
    """The report of everything, and every episode of the last method on a page."""
    from turngym.scripts import report, trace

    runs = [f"{name}={plan.out / 'eval' / name}" for name in ("student", "teacher")]
    report.main([*runs, *(f"{method}={plan.out / method}" for method in plan.methods), "--out", str(plan.out)])
    page, last = plan.out / "episodes.html", plan.methods[-1]
    words = ["html", str(plan.out / last / "eval" / "trace.jsonl"), "--out", str(page), "--overwrite"]
    trace.main([*words, "--title", f"{last} after {plan.steps} steps", "--tokenizer", str(plan.student)])
    print(f"\n{_verdict(plan)}")


def _verdict(plan: Plan) -> str:
    """What each method made of the student, in words."""
    from turngym.agents.evaluation.scores import score
    from turngym.scripts.reports.data import load_run

    def result(path: Path) -> tuple[float, float]:
        run = load_run(str(path))
        return 100 * score(run.episodes).overall.avg.mean, max((point.seconds for point in run.points), default=0.0)

    start, teacher = (result(plan.out / "eval" / name)[0] for name in ("student", "teacher"))
    lines = [f"Avg@{plan.samples} of the student: {start:.1f} % before, the teacher has {teacher:.1f} %."]
    for method in plan.methods:
        end, seconds = result(plan.out / method)
        share = f" ({100 * end / teacher:.0f} % of the teacher)" if teacher else ""
        lines.append(f"{method}: {end:.1f} %{share} in {seconds:.0f} s of training.")
    return "\n".join(lines)

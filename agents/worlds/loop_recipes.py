"""How pairs of models are made that have seen players fall into loops.

Models taught by an expert alone have no idea how a player in a loop goes on, and disagree about it for ever. These are
mixtures of the same players in other shares: the history tells who is playing, and both go on alike (docs/worlds.md).
"""

from __future__ import annotations

from dataclasses import replace

from turngym.agents.worlds.world import TinyRecipe


def loop_recipes(start: str, mistakes: float = 0.5) -> dict[str, TinyRecipe]:
    """`student` and `teacher`, and what they grow from, which grows from `start`; `mistakes` as in `TinyRecipe`."""
    mixture = TinyRecipe(
        steps=110,
        lr=1.5e-3,
        start=start,
        players="expert:.35,noisy:.2,repeat:.2,cycle:.25",
        mistakes=mistakes,
        loop_after=1.6,
        # a model samples, so its loops have slips; without these it is thrown out of them, and the two disagree
        loop_slips=0.1,
        dtype="float16",
    )
    student = replace(
        mixture, steps=55, lr=1.2e-3, seed=1, start="mixture", players="expert:.3,noisy:.3,repeat:.25,cycle:.15"
    )
    skilled = replace(
        mixture,
        steps=180,
        seed=2,
        start="student",
        players="expert:.45,noisy:.5,repeat:.03,cycle:.02",
        noise=(0.02, 0.4),
        # by episode: a loop that lasts to the end would outweigh an expert's few turns
        weight="episode_mean",
    )
    # skilled as it is, it has all but forgotten loops, and blames a player in one for every slip
    teacher = replace(
        skilled, steps=60, lr=1e-3, seed=3, start="skilled", players="expert:.4,noisy:.4,repeat:.12,cycle:.08"
    )
    return {"mixture": mixture, "student": student, "skilled": skilled, "teacher": teacher}

"""Text without a download, for studies of algorithms that model language beside their reward (L_PT).

`expert`: what the world's expert sees and does. `passages`: articles of the generated search fictions, some of them
held out, so that forgetting can be measured: `heldout_nats`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from turngym.agents.playing.env_maker import env_maker, probe
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, named_player
from turngym.agents.worlds.worlds import EmbeddedWorld
from turngym.core.episode import Episode
from turngym.core.whole_files import atomic_write
from turngym.envs.search.fiction import TINY, Part
from turngym.envs.search.fiction_questions import generate_fiction, one_fiction
from turngym.trainers.algorithm import Algorithm
from turngym.trainers.algorithm_spec import AlgorithmSpec, BuildContext
from turngym.trainers.algorithms import sft
from turngym.trainers.lm_loss import LmLoss

EPISODES = 64
"""Episodes of the expert."""
ARTICLES = 8
"""Articles to a document of passages: some 120 tokens of the tiny models."""
COUNTS: Mapping[Part, int] = {"train": 2000, "eval": 100}
"""Documents of passages. No fact of a held-out one is in a training fiction; names are coined from the same parts."""


def text_path(out: Path, world: str, text: str) -> Path:
    """The file of a text in the folder of a study."""
    return out / "texts" / (f"{world}-expert.txt" if text == "expert" else "passages-train.txt")


def write_text(path: Path, text: str, world: EmbeddedWorld | None) -> None:
    """Writes a text, unless it is there. Blank lines separate documents."""
    if path.exists():
        return
    if text == "passages":
        documents = list(islice(article_documents("train"), COUNTS["train"]))
    else:
        assert world is not None, "only an embedded world has an expert that can be asked for text"
        make_env = env_maker(world.env_id, split=world.split, max_turns=world.max_turns, **world.make)
        ids = probe(world.env_id, {"split": world.split, **world.make}).task_ids()
        jobs = [Job(task_id=ids[number % len(ids)], sample=number, group=number) for number in range(EPISODES)]
        played = rollout(jobs, make_env, ExpertAgent(expert=named_player(world.expert)), max_turns=world.max_turns)
        documents = [document(episode, world.tags) for episode in played]
    with atomic_write(path) as file:
        file.write("\n\n".join(documents) + "\n")


def document(episode: Episode, tags: Sequence[str] = ("action",)) -> str:
    """The observations and actions of an episode as lines; an action whose tag is its verb already carries it."""
    form = "<action>{}</action>" if "action" in tags else "{}"
    lines = [line for turn in episode.turns for line in (turn.observation, form.format(turn.action))]
    return re.sub(r"\n\s*\n", "\n", "\n".join([*lines, episode.final_observation or ""])).strip()


def article_documents(part: Part) -> Iterator[str]:
    """Articles in the order of the fictions, `ARTICLES` to a document, each its title and its text."""
    fictions = (TINY.fictions or (1, 1))[part == "eval"]
    for number in range(fictions):
        articles = [
            f"{passage.title}\n{passage.text}" for passage in generate_fiction(one_fiction(TINY, part, number)).passages
        ]
        # a fiction's last articles are left out where they do not fill a document
        for start in range(0, len(articles) - ARTICLES + 1, ARTICLES):
            yield "\n".join(articles[start : start + ARTICLES])


def heldout_nats(model: Path) -> dict[str, float]:
    """Number of each held-out document -> mean negative log-likelihood of its tokens after the first, in nats."""
    from turngym.trainers.scorer import load_scorer, load_student

    _, tokenizer = load_student(model, "float32", "cpu")
    texts = islice(article_documents("eval"), COUNTS["eval"])
    rows = [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in texts]
    scorer = load_scorer(model, dtype="float32", device="cpu", temperature=1.0, max_tokens=2048)
    scored = scorer.logprobs(rows, [np.arange(1, len(row)) for row in rows])
    return {str(number): -float(np.mean(part, dtype=np.float64)) for number, part in enumerate(scored)}


# A student that has seen text: imitation with language modeling beside it, with which the study of L_PT begins.


def _build(config: sft.SftConfig, context: BuildContext) -> Algorithm:
    """Supervised fine-tuning with lambda L_PT added (`lm_loss`)."""
    return replace(sft.build(config, context), terms=(LmLoss.of(context),))


READER = AlgorithmSpec(
    name="sft-text",
    config=sft.SftConfig,
    build=_build,
    section="sft",
    uses=frozenset({"expert", "shown", "imitates", "text"}),
    about="Supervised fine-tuning on demonstrations and on text.",
)
"""`algorithm = "turngym.scripts.study.texts:READER"`."""

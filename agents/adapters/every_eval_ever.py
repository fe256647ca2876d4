"""A result in the schema of Every Eval Ever (evaleval/every_eval_ever, version 0.3.0): one file of numbers, one of
episodes, where their repository has them.

What the schema cannot hold: verdict and reward of a turn, and hashes of tasks and panel, which are texts in `metadata`
and `additional_details`. Nor can such a file be checked by playing it again, as a packed result can.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from time import time
from typing import Any, Literal
from uuid import UUID

from turngym.agents.adapters.exported_numbers import (
    Number,
    hub_id,
    numbers_of,
    panel_of_result,
    rules_of,
    times_of,
    write_texts,
)
from turngym.agents.evaluation.packed_file import PackedResult
from turngym.core.spec import to_table

SCHEMA = "0.3.0"
Relationship = Literal["first_party", "third_party", "collaborative", "other"]
LACKS = "verdicts and rewards of single turns are texts in it, and nobody can check it by playing it again"


def write(
    result: PackedResult, out: Path, *, model: str, organization: str, relationship: Relationship = "other"
) -> list[Path]:
    """Writes both files below `out`, in the folders of their repository, and returns their paths.

    Raises EvaluationError for another id of a model, and for a result without episodes that ended well.
    """
    developer, _, name = hub_id("--model", model).partition("/")
    panel, numbers, times = panel_of_result(result), numbers_of(result), times_of(result)
    # their files are named by random ids; this one is of the content, so that an export twice has one name
    digest = sha256(json.dumps([panel.panel, model, result.lines()]).encode()).digest()
    stem = str(UUID(bytes=digest[:16], version=4))
    shared = {"schema_version": SCHEMA, "evaluation_id": f"{panel.panel}/{model}/{stem}"}
    folder = Path("data", panel.panel.replace(":", "-"), developer, name)
    head = {**shared, "model_id": model, "evaluation_name": panel.panel, "evaluation_result_id": numbers[0].name}
    rows = "".join(json.dumps(row) + "\n" for row in _rows(result, head))
    samples = folder / f"{stem}_samples.jsonl"
    unknown = {"deployment_type": "unknown", "model_availability": "unknown"}
    evaluation = {
        **shared,
        "retrieved_timestamp": f"{time():.0f}",
        **({"evaluation_timestamp": f"{times[1].timestamp():.0f}"} if times else {}),
        "source_metadata": {
            "source_name": "turngym",
            "source_type": "evaluation_run",
            "source_organization_name": organization,
            "evaluator_relationship": relationship,
        },
        "eval_library": {"name": "turngym", "version": result.versions.get("turngym", "unknown")},
        "model_info": {"name": result.agent, "id": model, "developer": developer, "additional_details": unknown},
        "evaluation_results": [_number(result, number) for number in numbers],
        "detailed_evaluation_results": {
            "format": "jsonl",
            "file_path": samples.as_posix(),
            "hash_algorithm": "sha256",
            "checksum": sha256(rows.encode()).hexdigest(),
            "total_rows": len(result.episodes),
        },
    }
    return write_texts({out / folder / f"{stem}.json": json.dumps(evaluation, indent=1) + "\n", out / samples: rows})


def _number(result: PackedResult, number: Number) -> dict[str, Any]:
    play, panel = result.spec.play, panel_of_result(result)
    generation: dict[str, Any] = {"additional_details": {"spec": json.dumps(to_table(result.spec), sort_keys=True)}}
    if (temperature := getattr(result.spec.agent, "temperature", None)) is not None:
        generation["generation_args"] = {"temperature": temperature}
    details: dict[str, Any] = {"score": number.value}
    if number.interval is not None:
        interval = {"lower": number.interval.low, "upper": number.interval.high, "confidence_level": 0.95}
        details["uncertainty"] = {"confidence_interval": interval, "num_samples": number.interval.tasks}
    return {
        "evaluation_result_id": number.name,
        "evaluation_name": panel.panel if "." not in number.name else f"{panel.panel} {number.name.partition('.')[2]}",
        "source_data": {
            "dataset_name": panel.panel,
            "source_type": "other",
            "additional_details": {"sha256": panel.sha256, "tasks": str(panel.size), "env_id": play.env.id},
        },
        "metric_config": {
            "evaluation_description": f"{number.about} Rules: {rules_of(result)}.",
            "metric_id": number.name.partition(".")[0],
            "lower_is_better": number.name == "invalid",
            "metric_unit": "proportion",
            "score_type": "continuous",
            "min_score": 0.0,
            "max_score": 1.0,
            **({"metric_parameters": {"k": number.k}} if number.k else {}),
        },
        "score_details": details,
        "generation_config": generation,
    }


def _rows(result: PackedResult, head: dict[str, str]) -> Iterator[dict[str, Any]]:
    for episode in result.episodes:
        messages = [("system", episode.system)] if episode.system else []
        attributions = []
        for turn in episode.turns:
            messages += [("user", turn.observation), ("assistant", turn.response)]
            attributions.append(
                {
                    "turn_idx": len(messages) - 1,
                    "source": f"messages[{len(messages) - 1}].content",
                    "extracted_value": turn.action or "",
                    "extraction_method": "custom",
                    "is_terminal": turn is episode.turns[-1],
                }
            )
        yield {
            **head,
            "sample_id": f"{episode.task.task_id}#{episode.sample}",
            "interaction_type": "agentic",
            "input": {"raw": episode.turns[0].observation if episode.turns else "", "reference": []},
            "output": None,
            "messages": [{"turn_idx": i, "role": role, "content": text} for i, (role, text) in enumerate(messages)],
            "answer_attribution": attributions,
            "evaluation": {"score": episode.score, "is_correct": episode.success, "num_turns": len(episode.turns)},
            "error": episode.status.value if episode.status.is_error else None,
            "metadata": {
                "category": episode.task.category,
                "sha256": episode.task.sha256,
                "seed": str(episode.seed),
                "status": episode.status.value,
                "verdicts": " ".join(turn.verdict.value for turn in episode.turns),
                "rewards": " ".join(f"{turn.reward!r}" for turn in episode.turns),
            },
        }

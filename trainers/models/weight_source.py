"""A model in training as those read it who sample with its weights elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turngym.trainers.models.lora import merged
from turngym.trainers.models.model import save_model
from turngym.trainers.models.scorer import LocalScorer


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Implements `WeightSource`: what `model` has now, its adapters merged in."""

    model: Any

    def save(self, folder: Path) -> None:
        save_model(self.model, folder, merged(self.model, self.model.state_dict()))

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        # parameters, not the state dict: a head tied to the embedding is then sent once
        return merged(self.model, dict(self.model.named_parameters())).items()

    def scorer(self) -> LocalScorer:
        return LocalScorer(model=self.model)

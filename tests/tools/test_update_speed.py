"""Updates side by side: both sides train on the same labels, and attention's operations are counted as by hand."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import update_speed

from turngym.agents import load_world

pytestmark = pytest.mark.long
ARGV = [str(load_world("alfworld").checkpoint("student")), "--micro-tokens", "100000"]


def test_attention_is_counted_as_by_hand() -> None:
    states = torch.randn(1, 2, 10, 8, requires_grad=True)

    def attend(causal: bool) -> None:
        torch.nn.functional.scaled_dot_product_attention(states, states, states, is_causal=causal).sum().backward()

    # two products of 2 heads x 10 x 10 x 8 forward, five backward; half of them under a causal mask
    assert update_speed.operations(lambda: attend(False)) == 7 * 2 * 2 * 10 * 10 * 8
    assert update_speed.operations(lambda: attend(True)) == 7 * 2 * 10 * 10 * 8


def gradient(model: Any, run: Any) -> Any:
    model.zero_grad()
    run()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def test_both_sides_train_on_the_same_labels(capsys: pytest.CaptureFixture[str]) -> None:
    """With equal weights of all tokens, as transformers' mean has it, one pass gives one gradient."""
    seen: dict[str, Any] = {}
    accumulate = update_speed.optimizer_step.accumulate

    def kept(model: Any, batch: Any, **how: Any) -> Any:
        if not seen:
            equal = np.full(batch.tokens, 1 / batch.tokens)
            seen["ours"] = gradient(model, lambda: accumulate(model, batch, **how | {"weight_N": equal}))
            seen["theirs"] = gradient(model, lambda: update_speed.padded(model, batch, 10**6, False))
        return accumulate(model, batch, **how)

    with (
        mock.patch.object(update_speed.optimizer_step, "accumulate", kept),
        mock.patch.object(update_speed, "seconds", return_value=1.0),
    ):
        assert update_speed.main(ARGV) == 0
    torch.testing.assert_close(seen["ours"], seen["theirs"], rtol=1e-3, atol=1e-6)
    said = capsys.readouterr().out
    assert "of them supervised" in said
    assert "attention: " in said
    assert "transformers / turngym: 1.00" in said

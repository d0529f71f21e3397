"""What is said of a task that failed: the task's own line, wherever beneath it the exception rose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roundtable.client.failures import diagnose
from roundtable.core.task import load_task

TASK = """
import json
import roundtable as rt
from roundtable.aggregation.rows.gram import gram
from roundtable.client.training.metrics import loss_of

class Ward(rt.Task):
    def model(self): ...
    def data(self, site): ...
    def loss(self, model, batch):
        return {call}
"""


@pytest.mark.parametrize("call", ["gram(None)", "loss_of(None)", "json.loads('Jane Doe')"])
def test_the_line_that_is_named_is_the_tasks_own(call: str, tmp_path: Path) -> None:
    (tmp_path / "ward.py").write_text(TASK.replace("{call}", call))
    loss: Callable[..., object] = load_task("ward.py", tmp_path).loss  # type: ignore[union-attr]
    with pytest.raises(Exception) as caught:
        loss(None, None)
    diagnosis = diagnose(caught.value)
    assert "in ward.py, line 11, in loss()" in diagnosis.detail
    assert "Jane" not in diagnosis.detail
    assert "Jane" in diagnosis.trace or "json" not in call

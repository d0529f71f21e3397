"""A base that lies in another's place at a silo, while its training process holds what it has read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_bases import sentences, write_base

from roundtable.client.failures import diagnose
from roundtable.client.worker.executor import Executor, Settings
from roundtable.client.worker.worker_order import Order
from roundtable.core import JobConfig, load_task, save_model
from roundtable.core.errors import ModelMismatch
from roundtable.core.initial_model import initial_model


def order_of(folder: Path, job: JobConfig, name: str) -> Order:
    """Round 1 of a job that is submitted with the base as it lies there now."""
    task = load_task(job.task.name, folder, parameters=job.task.parameters)
    model = initial_model(job, task)
    path = folder / f"{name}.safetensors"
    save_model(path, model)
    made = model.layout.fingerprint
    return Order(name, 1, "train", job.to_json(), job.task.name, str(path), made, str(folder / f"{name}.out"))


def test_another_tokenizer_in_its_place_is_told_and_read_anew(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    data = tmp_path / "notes.jsonl"
    data.write_text("\n".join(json.dumps({"text": text}) for text in sentences(16)))
    parameters = {"name": "roundtable:HuggingFaceTask", "base": str(base), "length": 32}
    job = JobConfig.model_validate({"task": parameters, "algorithm": {"batch_size": 4, "steps": 1}})
    settings = Settings("a", str(tmp_path), str(tmp_path / "jobs"), "cpu", 1, {"file": str(data)})
    executor, tokens = Executor(settings), base / "tokenizer.json"
    right = tokens.read_text()
    first = order_of(tmp_path, job, "first")
    before = executor.evaluate(first)
    tokens.write_text(right.replace('"add_prefix_space": false', '"add_prefix_space": true'))
    with pytest.raises(ModelMismatch, match="the digest of its tokenizer is") as caught:
        executor.train(replace(first, job="again"), lambda *seen: None)
    assert diagnose(caught.value).kind == "model_mismatch"
    # Another job of the same parameters, in the same process: rows are of the tokenizer that is there.
    other = order_of(tmp_path, job, "other")
    now = executor.evaluate(other)
    assert now == Executor(settings).evaluate(other)
    assert now != before
    tokens.write_text(right)
    assert executor.evaluate(replace(first, job="again")) == before
    (base / "model.safetensors").rename(base / "gone.safetensors")
    with pytest.raises(ModelMismatch, match="cannot be loaded"):
        executor.evaluate(replace(first, job="third"))

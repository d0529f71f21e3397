"""In what a silo's model is another than the job's, in words for whoever is to make them alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from roundtable.core.foundation.adapters import ORIGINAL
from roundtable.core.foundation.pretrained_task import PINNED, PretrainedTask
from roundtable.core.layout import Layout
from roundtable.core.task import AnyTask
from roundtable.core.tensor_spec import TensorSpec

_SHOWN = 12
"""Digits of a digest that people compare."""
_FILES = {
    "tokenizer": "tokenizer.json, tokenizer_config.json",
    "special_tokens": "tokenizer_config.json, special_tokens_map.json",
    "chat_template": "chat_template.jinja or tokenizer_config.json",
    "model_config": "config.json",
    "image_processor": "preprocessor_config.json",
}
"""Where of a base's folder each pinned thing is read from, as transformers does."""


def model_difference(own: Layout, theirs: Layout, task: AnyTask) -> str:
    """Why the model of the silo's task is not the job's: what differs, its value on both sides, the remedy.

    Of a pretrained base all that is pinned, and how many of its frozen weights; of others the first tensor.
    """
    mine, job = _specs(own), _specs(theirs)
    if isinstance(task, PretrainedTask):
        parts = _pins(mine, job)
        if set(mine) - set(_pinned(mine)) == set(job) - set(_pinned(job)):
            parts += _weights(mine, job)
        if parts:
            return _of_base(parts, task)
    for name in [*job, *mine]:
        if mine.get(name) != job.get(name):
            spec = job.get(name)
            return (
                f"the model of the silo's task is not the job's: {name!r} is {_shape(mine, name)} here and "
                f"{_shape(job, name)} in the job; install the version of the task that the job was made with"
                f"{_FROZEN if spec is not None and spec.digest else ''}"
            )
    return "the job announces another layout than its model has"


def pins_difference(own: Iterable[str], theirs: Iterable[str], task: AnyTask) -> str:
    """The same of the names of what is pinned alone; empty where they are the same, or of another task."""
    parts = _pins(own, theirs) if isinstance(task, PretrainedTask) else []
    return _of_base(parts, task) if parts and isinstance(task, PretrainedTask) else ""


_FROZEN = (
    ", and the same pretrained weights: what is frozen does not travel ([model] travel), and has to be the "
    "same at every silo"
)


def _of_base(parts: list[str], task: PretrainedTask) -> str:
    return (
        f"the base {task.base!r} here is not the one that the job was submitted with: "
        f"{'; '.join(parts)}. Nothing of a base travels: it has to be alike everywhere"
    )


def _pins(own: Iterable[str], theirs: Iterable[str]) -> list[str]:
    mine, job = _pinned(own), _pinned(theirs)
    found, parts = dict(mine.values()), []
    for kind, value in job.values():
        here = found.get(kind, "none")
        # The job's names are another party's words: of no other kind or form is anything said here.
        if here == value or not value.isalnum():
            continue
        if kind == "transformers":
            parts.append(f"transformers is of version {here} here and {value[:4]} in the job; install that")
        elif kind == "labels":
            parts.append("the labels are others here than in the job, or in another order; take the job's")
        elif kind in _FILES:
            parts.append(
                f"the digest of its {kind.replace('_', ' ')} is {here[:_SHOWN]} here and {value[:_SHOWN]} in "
                f"the job; take {_FILES[kind]} of the job's base"
            )
    return parts


def _weights(mine: Mapping[str, TensorSpec], job: Mapping[str, TensorSpec]) -> list[str]:
    """Of frozen tensors with other values; none where anything else differs, too."""
    frozen = [name for name, spec in job.items() if spec.digest and name not in _pinned(job)]
    other = [name for name in frozen if mine[name].digest != job[name].digest]
    if not other:
        return []
    drawn = all(".lora_A." in name or ORIGINAL in name for name in other)
    remedy = (
        "these are drawn by the job's seed: install the versions of torch and peft of the job's"
        if drawn
        else "take the revision of the base that the job's is, in the same precision"
    )
    return [
        f"{len(other)} of {len(frozen)} frozen weights have other values, such as {other[0]!r} of digest "
        f"{(mine[other[0]].digest or 'none')[:_SHOWN]} here and {(job[other[0]].digest or '')[:_SHOWN]} in "
        f"the job; {remedy}"
    ]


def _pinned(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """(kind, value) of each name that pins something."""
    start = f"{PINNED}."
    parted = {name: name.removeprefix(start).rpartition("_") for name in names if name.startswith(start)}
    return {name: (kind, value) for name, (kind, _, value) in parted.items()}


def _specs(layout: Layout) -> dict[str, TensorSpec]:
    return {spec.name: spec for spec in layout.tensors}


def _shape(specs: Mapping[str, TensorSpec], name: str) -> str:
    spec = specs.get(name)
    if spec is None:
        return "absent"
    values = f" with values of digest {spec.digest[:_SHOWN]}" if spec.digest else ""
    return f"{spec.dtype} {list(spec.shape)} ({spec.rule}{values})"

"""What `roundtable new` copies: templates, and examples as they are.

A template is a folder that runs as it lies there, with the task `starter` and its class `Starter`;
whoever takes one gives both names of their own. An example is copied as it is.
"""

from __future__ import annotations

import keyword
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from roundtable.core.errors import ConfigError

EXAMPLES = Path(__file__).resolve().parent / "examples"
TEMPLATES = EXAMPLES / "templates"
# What else lies in a folder that somebody has worked in.
_LEFT_OUT = ("__pycache__", "*.pyc", ".*", "run", "runs", "base.safetensors")


@dataclass(frozen=True)
class StartingPoint:
    """Something to begin with: its folder, what it is, how it is run, what it needs beside the install."""

    name: str
    folder: Path
    says: str
    run: str
    needs: str = ""

    @property
    def is_example(self) -> bool:
        """Copied as it is, under its own name."""
        return self.folder.parent == EXAMPLES


_SIMULATE = "roundtable simulate job.toml"

STARTERS = {
    name: StartingPoint(name, TEMPLATES / name, says, run, needs)
    for name, says, run, needs in (
        ("tabular", "a table of numbers, yes or no: a small network, AUROC", _SIMULATE, ""),
        ("vision", "grey images, several classes: a small convolutional network", _SIMULATE, ""),
        ("text", "short texts, several classes: a bag of words", _SIMULATE, ""),
        ("survival", "times to an event: Cox's hazards with a small network, C-index", _SIMULATE, ""),
        (
            "llm",
            "a language model that is fine-tuned by adapters, over a tiny base that is made here",
            f"python make_base.py && {_SIMULATE}",
            "roundtable-fl[huggingface]",
        ),
        (
            "encoder",
            "texts, several classes: a BERT that is fine-tuned, over a tiny base that is made here",
            f"python make_base.py && {_SIMULATE}",
            "roundtable-fl[huggingface]",
        ),
        ("script", "a PyTorch script of your own that joins rounds, with real processes", "sh run.sh", ""),
    )
}

BUILT_EXAMPLES = {
    name: StartingPoint(name, EXAMPLES / name, says, run, needs)
    for name, says, run, needs in (
        ("digits", "handwritten digits over three uneven silos: the demo's task", _SIMULATE, "scikit-learn"),
        ("heart", "four hospitals' heart disease data, as FLamby splits them", _SIMULATE, ""),
        ("mnist", "the network of McMahan et al. 2017", _SIMULATE, "MNIST's files"),
        ("lora", "low-rank adapters over a frozen model", f"python make_base.py && {_SIMULATE}", ""),
        ("experts", "a mixture of experts for a silo's cluster", _SIMULATE, ""),
        ("convergence", "quadratics of which everything is known", _SIMULATE, ""),
        (
            "frameworks",
            "scikit-learn, JAX, Keras, Lightning, XGBoost: a short task each",
            _SIMULATE,
            "scikit-learn",
        ),
        ("second_door", "training scripts with PyTorch and scikit-learn", "cat README.md", "scikit-learn"),
    )
}


def find_start(name: str) -> StartingPoint:
    """The starting point or example of that name; ConfigError with the known ones otherwise."""
    found = STARTERS.get(name) or BUILT_EXAMPLES.get(name)
    if found is None:
        raise ConfigError(
            f"there is no template or example {name!r}. Templates: {', '.join(STARTERS)}. "
            f"Examples: {', '.join(BUILT_EXAMPLES)}"
        )
    return found


def task_name(name: str) -> str:
    """The name, if a task and its file can have it; ConfigError otherwise."""
    if not (name.isidentifier() and name.isascii() and name == name.lower()) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a task. Use small letters, digits and underscores, such as 'ct_scans'"
        )
    if name in sys.stdlib_module_names or name in ("roundtable", "torch", "numpy", "starter"):
        raise ConfigError(f"{name}.py would hide the module {name!r} of Python. Choose another name")
    return name


def class_name(name: str) -> str:
    """ct_scans → CtScans."""
    return "".join(part.capitalize() for part in name.split("_")) or name


def write_start(start: StartingPoint, name: str, target: Path) -> list[Path]:
    """Copies a start to the folder `target`, which must be empty or absent; the files, relative to it.

    A template's task becomes `name`; an example keeps its own. Raises ConfigError where something is
    there already, or where the name cannot be a task's.
    """
    if not start.is_example:
        task_name(name)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} is there already and not empty. Choose another folder with --into")
    shutil.copytree(start.folder, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    files = sorted(file for file in target.rglob("*") if file.is_file())
    if not start.is_example:
        files = [_renamed(file, name) for file in files]
    return [file.relative_to(target) for file in files]


def _renamed(file: Path, name: str) -> Path:
    text = file.read_text(encoding="utf-8")
    own = text.replace("Starter", class_name(name)).replace("starter", name)
    place = file.with_name(file.name.replace("starter", name))
    file.unlink()
    place.write_text(own, encoding="utf-8")
    return place

"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# Nothing depends on how busy the machine is. Tests on the wheel, which decide over a change, draw the same
# examples each time, and fewer; those on the source tree draw others in every run, and keep what they find.
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True, max_examples=60)
settings.load_profile("same" if "ROUNDTABLE_WHEEL" in os.environ else "explore")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without looking for garbage: what is collected stays, and reading it over takes as long again.

    Nor is it read later, whenever Python looks for cycles among all that lives.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several workers share the tests: first the files with one that is given more time than others,
    then those with many, so that no worker is left with a long one while the others have nothing to do.
    """
    if not hasattr(config, "workerinput"):
        return
    usual = float(config.getini("timeout"))
    counts, most = Counter(item.path for item in items), defaultdict[Path, float](lambda: usual)
    for item in items:
        if (mark := item.get_closest_marker("timeout")) is not None and mark.args:
            most[item.path] = max(most[item.path], mark.args[0])
    items.sort(key=lambda item: (-most[item.path], -counts[item.path]))


def _shared() -> Path:
    return Path(os.environ.get("ROUNDTABLE_SHARED", ROOT.parent / "shared"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the source tree."""
    return ROOT


@pytest.fixture(scope="session")
def reference_dir() -> Path:
    """Reference numbers computed outside the project; the test is skipped where they are absent."""
    folder = _shared() / "reference"
    if not folder.is_dir():
        pytest.skip(f"no reference numbers at {folder}; set ROUNDTABLE_SHARED to the folder that holds them")
    return folder


@pytest.fixture(scope="session")
def mnist_path() -> Path:
    """MNIST as one .npz; the test is skipped where it is absent."""
    file = _shared() / "data" / "mnist.npz"
    if not file.is_file():
        pytest.skip(f"no MNIST at {file}; set ROUNDTABLE_SHARED to the folder that holds data/mnist.npz")
    return file

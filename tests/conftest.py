"""Fixtures that every folder of tests shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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

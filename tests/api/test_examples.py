"""The examples' own code: reading MNIST in each common form."""

from __future__ import annotations

import gzip
import struct
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from roundtable.core import Site, load_job, load_task
from roundtable.core.initial_model import initial_model


@pytest.fixture(scope="module")
def mnist(root: Path) -> ModuleType:
    task = load_task("mnist", root / "examples" / "mnist")
    return sys.modules[type(task).__module__]


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    chance = np.random.default_rng(0)
    return {
        "x_train": chance.integers(0, 256, (20, 28, 28), dtype=np.uint8),
        "y_train": np.repeat(np.arange(10, dtype=np.uint8), 2),
        "x_test": chance.integers(0, 256, (10, 28, 28), dtype=np.uint8),
        "y_test": np.arange(10, dtype=np.uint8),
    }


def _idx_bytes(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}i", 0, 8, array.ndim, *array.shape) + array.tobytes()


def _write(form: str, folder: Path, arrays: dict[str, np.ndarray]) -> Path:
    if form in ("keras", "long"):
        keys = ("train_images", "train_labels", "test_images", "test_labels")
        named = dict(zip(keys, arrays.values(), strict=True)) if form == "long" else arrays
        np.savez(folder / "mnist.npz", **named)
        return folder / "mnist.npz" if form == "keras" else folder
    if form == "png":
        for part in ("train", "test"):
            for number, (image, label) in enumerate(
                zip(arrays[f"x_{part}"], arrays[f"y_{part}"], strict=True)
            ):
                (folder / part / str(label)).mkdir(parents=True, exist_ok=True)
                Image.fromarray(image).save(folder / part / str(label) / f"{number:05}.png")
        return folder
    names = (
        "train-images{}idx3-ubyte",
        "train-labels{}idx1-ubyte",
        "t10k-images{}idx3-ubyte",
        "t10k-labels{}idx1-ubyte",
    )
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, array in zip(names, arrays.values(), strict=True):
        if form == "gzip":
            (raw / f"{name.format('-')}.gz").write_bytes(gzip.compress(_idx_bytes(array)))
        else:
            (raw / name.format(".")).write_bytes(_idx_bytes(array))
    return folder


@pytest.mark.parametrize("form", ["keras", "long", "png", "gzip", "idx"])
def test_mnist_is_read_in_each_form(
    form: str, tmp_path: Path, mnist: ModuleType, arrays: dict[str, np.ndarray]
) -> None:
    (train, train_labels), (test, test_labels) = mnist.read(_write(form, tmp_path, arrays))
    np.testing.assert_array_equal(train, arrays["x_train"])
    np.testing.assert_array_equal(train_labels, arrays["y_train"])
    np.testing.assert_array_equal(test, arrays["x_test"])
    np.testing.assert_array_equal(test_labels, arrays["y_test"])


def test_no_mnist_says_what_is_wanted(tmp_path: Path, mnist: ModuleType) -> None:
    with pytest.raises(FileNotFoundError, match=r"simulation\.data\.mnist"):
        mnist.read(tmp_path / "nowhere")
    np.savez(tmp_path / "other.npz", a=np.zeros(1))
    with pytest.raises(ValueError, match="expected x_train"):
        mnist.read(tmp_path / "other.npz")


def test_the_network_is_that_of_the_paper(root: Path) -> None:
    folder = root / "examples" / "mnist"
    job = load_job(folder / "job.toml")
    assert initial_model(job, load_task(job.task.name, folder)).layout.size == 1_663_370


def test_a_silo_uses_its_own_file_and_a_simulation_the_whole(root: Path, tmp_path: Path) -> None:
    folder = root / "examples" / "digits"
    task = load_task("digits", folder)
    train, test = task.data(Site("all"))
    assert (len(train[1]), len(test[1])) == (1437, 360)
    np.savez(tmp_path / "mine.npz", images=np.zeros((10, 64), np.uint8), labels=np.ones(10, np.uint8))
    train, test = task.data(Site("silo", options={"digits": tmp_path / "mine.npz"}))
    assert (len(train[1]), len(test[1])) == (8, 2)

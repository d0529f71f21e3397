"""MNIST with the convolutional network of McMahan et al. (2017), from files in any common form.

Point `mnist` in [simulation.data], or in the [data] table of a silo's agent.toml, at one of

    a folder with the four IDX files, gzipped or not (train-images-idx3-ubyte.gz, ...), at any depth
    an .npz file with x_train, y_train, x_test, y_test (as Keras has it), or train_images, ...
    a folder of PNGs: train/0/*.png ... train/9/*.png and test/0/*.png ... (or training/, testing/)
"""

import gzip
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import roundtable as rt

Tensors = tuple[Tensor, Tensor]
Arrays = tuple[np.ndarray, np.ndarray]


class Mnist(rt.Task):
    """Tells handwritten digits apart."""

    def model(self) -> nn.Module:
        """Two 5 x 5 convolutions of 32 and 64 channels, 512 units, 1,663,370 parameters (section 3)."""
        return nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(3136, 512),
            nn.ReLU(),
            nn.Linear(512, 10),
        )

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        train, test = read(Path(site.options.get("mnist", Path(__file__).parent / "data")))
        return _share(train, site), _share(test, site)

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        images, labels = batch
        return cross_entropy(model(images), labels)

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        images, labels = batch
        return {"accuracy": ((model(images).argmax(1) == labels).sum(), len(labels))}


@lru_cache(maxsize=1)
def read(place: Path) -> tuple[Arrays, Arrays]:
    """(train, test), each images uint8 [n, 28, 28] and labels uint8 [n]."""
    if place.suffix == ".npz" and place.is_file():
        return _read_npz(place)
    if place.is_dir():
        if any(place.rglob("*idx3*")):
            return _read_idx(place, "train"), _read_idx(place, "t10k")
        for names in (("train", "test"), ("training", "testing")):
            if all((place / name).is_dir() for name in names):
                return _read_pngs(place / names[0]), _read_pngs(place / names[1])
        for file in sorted(place.glob("*.npz")):
            return _read_npz(file)
    raise FileNotFoundError(
        f"no MNIST at {place}: it must be an .npz file, a folder with the IDX files, or a folder with "
        "train/0 ... test/9 of PNGs; name it as mnist in [simulation.data], "
        "for example --set simulation.data.mnist=/data/mnist"
    )


def _share(arrays: Arrays, site: rt.Site) -> Tensors:
    images, labels = arrays
    rows = site.shard(labels)
    pixels = torch.from_numpy(images[rows]).float().div_(255.0).unsqueeze(1)
    return pixels, torch.from_numpy(labels[rows].astype(np.int64))


def _read_npz(file: Path) -> tuple[Arrays, Arrays]:
    with np.load(file, allow_pickle=False) as found:
        for keys in (
            ("x_train", "y_train", "x_test", "y_test"),
            ("train_images", "train_labels", "test_images", "test_labels"),
        ):
            if all(key in found for key in keys):
                a, b, c, d = (found[key] for key in keys)
                return (a.reshape(-1, 28, 28), b.ravel()), (c.reshape(-1, 28, 28), d.ravel())
        raise ValueError(f"{file} holds {', '.join(found)}; expected x_train, y_train, x_test and y_test")


def _read_idx(folder: Path, part: str) -> Arrays:
    return _idx(folder, f"{part}*images*idx3*"), _idx(folder, f"{part}*labels*idx1*")


def _idx(folder: Path, pattern: str) -> np.ndarray:
    files = sorted(folder.rglob(pattern))
    if not files:
        raise FileNotFoundError(f"{folder} has no file like {pattern}")
    with gzip.open(files[0]) if files[0].suffix == ".gz" else files[0].open("rb") as file:
        data = file.read()
    # IDX: two zero bytes, type 8 (unsigned byte), the number of dimensions, each as a big-endian int32.
    if data[:3] != b"\x00\x00\x08":
        raise ValueError(f"{files[0]} is no IDX file of unsigned bytes")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start], dtype=">i4")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def _read_pngs(folder: Path) -> Arrays:
    from PIL import Image

    files = [(file, digit) for digit in range(10) for file in sorted((folder / str(digit)).glob("*.png"))]
    if not files:
        raise FileNotFoundError(f"{folder} has no PNGs in folders 0 to 9")
    images = np.stack([np.asarray(Image.open(file).convert("L"), dtype=np.uint8) for file, _ in files])
    return images, np.array([digit for _, digit in files], dtype=np.uint8)

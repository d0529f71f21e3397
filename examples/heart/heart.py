"""Heart disease at four hospitals: FLamby's Fed-Heart-Disease (Ogier du Terrail et al. 2022).

`data/` holds the four files of the UCI repository as they are (README.md says whose they are). A silo names
its own file as `heart` in the [data] table of its agent.toml; a simulation has all four, a hospital a client.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import roundtable as rt

Tensors = tuple[Tensor, Tensor]
DATA = Path(__file__).parent / "data"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
# Columns of a patient's record. Three more are mostly missing, and the last is the disease.
PLAIN = (0, 1, 3, 4, 5, 7, 8, 9)
# Kinds of chest pain and of electrocardiograms, known beforehand: no hospital has to see another's.
KINDS = {2: (1.0, 2.0, 3.0, 4.0), 6: (0.0, 1.0, 2.0)}


class Patients(NamedTuple):
    """Features float32 [n, 13] and whether there is a disease, float32 [n, 1]."""

    features: Tensor
    diseased: Tensor


class Heart(rt.Task):
    """Tells who has a heart disease by logistic regression of 13 features."""

    def model(self) -> nn.Module:
        return nn.Linear(13, 1)

    def data(self, site: rt.Site) -> tuple[Tensors, Tensors]:
        if "heart" in site.options:
            return split(read(Path(site.options["heart"])))
        files = [read(DATA / f"processed.{name}.data") for name in HOSPITALS]
        owners = np.repeat(HOSPITALS, [len(file.diseased) for file in files])
        rows = site.shard(owners)
        return split(Patients(*(torch.cat(column)[rows] for column in zip(*files, strict=True))))

    def loss(self, model: nn.Module, batch: Tensors) -> Tensor:
        features, diseased = batch
        return binary_cross_entropy_with_logits(model(features), diseased)

    def metrics(self, model: nn.Module, batch: Tensors) -> Mapping[str, tuple[Tensor, int]]:
        features, diseased = batch
        return {"accuracy": (((model(features) > 0) == (diseased > 0)).sum(), len(diseased))}


@cache
def read(path: Path) -> Patients:
    """The patients of one file, those with a missing value left out; an error names file and line."""
    features, diseased = [], []
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"no heart data at {path}: name the hospital's processed.*.data file as heart in [data]"
        ) from None
    for number, line in enumerate(lines, 1):
        try:
            record = _record(line.split(","))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from None
        if record is not None:
            features.append(record[:-1])
            diseased.append([float(record[-1] != 0)])
    return Patients(torch.tensor(features), torch.tensor(diseased))


def _record(texts: list[str]) -> list[float] | None:
    """13 features and the disease of one line; None where something is missing."""
    if len(texts) != 14:
        raise ValueError(f"{len(texts)} values where a patient has 14")
    if "?" in (*texts[:10], texts[13]):
        return None
    values = {column: float(texts[column]) for column in (*range(10), 13)}
    found = [values[column] for column in PLAIN]
    for column, kinds in KINDS.items():
        if values[column] not in kinds:
            raise ValueError(f"column {column + 1} is {values[column]:g}, not one of {kinds}")
        found += [float(values[column] == kind) for kind in kinds[1:]]
    return [*found, values[13]]


def split(patients: Patients) -> tuple[Patients, Patients]:
    """Two thirds to train, the rest to test, as FLamby splits; standardised by what there is to train."""
    train, test = parts(patients.diseased)
    mean, scale = moments(patients.features[train])
    features = (patients.features - mean) / scale
    return (
        Patients(features[train], patients.diseased[train]),
        Patients(features[test], patients.diseased[test]),
    )


def parts(diseased: Tensor) -> tuple[Tensor, Tensor]:
    """Row numbers to train and to test, by label where each label has more than two."""
    from sklearn.model_selection import train_test_split

    labels = diseased.flatten().numpy()
    plenty = all((labels == kind).sum() > 2 for kind in (0.0, 1.0))
    train, test = train_test_split(
        np.arange(len(labels)),
        train_size=0.66,
        test_size=0.34,
        random_state=43,
        shuffle=True,
        stratify=labels if plenty else None,
    )
    return torch.from_numpy(train), torch.from_numpy(test)


def moments(features: Tensor) -> Tensors:
    """Mean and deviation of each feature; the deviation of one that is everywhere the same is 1."""
    scale = features.std(dim=0)
    return features.mean(dim=0), torch.where(scale > 0, scale, torch.ones_like(scale))

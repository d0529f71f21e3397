"""For compose.yaml: certificates of everybody, and each silo's own part of the digits; once.

A real federation keeps its authority elsewhere, and no machine holds two silos' data.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from roundtable.core.identity.credentials import create_ca, issue

SILOS = ("north", "south")


def main(folder: Path) -> None:
    if (folder / "ready").exists():
        return
    create_ca(folder / "ca")
    issue(
        folder / "ca",
        "coordinator",
        "coordinator",
        folder / "coordinator",
        hosts=("coordinator", "localhost"),
    )
    issue(folder / "ca", "operator", "operator", folder / "operator")
    images, labels = (values.astype(np.uint8) for values in load_digits(return_X_y=True))
    for place, silo in enumerate(SILOS):
        issue(folder / "ca", silo, "agent", folder / silo)
        part = slice(place, None, len(SILOS))
        np.savez(folder / f"{silo}.npz", images=images[part], labels=labels[part])
    (folder / "ready").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Example-level privacy inside a silo: DP-SGD by book-keeping or Opacus, and the silo's own account."""

from roundtable.privacy.example_level.bookkeeping import BookKeeping
from roundtable.privacy.example_level.checks import check_model
from roundtable.privacy.example_level.dp_sgd import (
    PrivateTraining,
    Sources,
    make_private,
    secure_sources,
)
from roundtable.privacy.example_level.own_account import SiloAccount
from roundtable.privacy.example_level.per_example_clipping import UnsupportedModel
from roundtable.privacy.example_level.probe import MODES

__all__ = [
    "MODES",
    "BookKeeping",
    "PrivateTraining",
    "SiloAccount",
    "Sources",
    "UnsupportedModel",
    "check_model",
    "make_private",
    "secure_sources",
]

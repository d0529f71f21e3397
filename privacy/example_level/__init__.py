"""Example-level privacy inside a silo: DP-SGD by book-keeping or Opacus, and the silo's own account."""

from roundtable.privacy.example_level.account import SiloAccount
from roundtable.privacy.example_level.bookkeeping import BookKeeping
from roundtable.privacy.example_level.checks import check_model
from roundtable.privacy.example_level.clipping import UnsupportedModel
from roundtable.privacy.example_level.probe import MODES
from roundtable.privacy.example_level.training import (
    PrivateTraining,
    Sources,
    make_private,
    secure_sources,
    step_charge,
)

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
    "step_charge",
]

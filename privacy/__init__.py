"""Differential privacy: bounding, noise, and the account of what has been spent.

Pure code: no network, no database. Importing this is cheap; accountants, Opacus and plots are loaded
by the functions that need them.
"""

from roundtable.privacy.accounting import compose, merged, relation_of
from roundtable.privacy.audit import Audit, one_run_audit
from roundtable.privacy.calibration import solve_noise, solve_steps
from roundtable.privacy.central import CentralDP, CentralResult, RowMatrix
from roundtable.privacy.charge import Charge, gaussian_charge, local_gaussian_charge
from roundtable.privacy.clipping import AdaptiveClip, Clipped, clip, clip_per_layer, l2_norm
from roundtable.privacy.config import PrivacyConfig, check_delta
from roundtable.privacy.discrete import discrete_gaussian, skellam
from roundtable.privacy.distributed import DistributedDP, decode, encode
from roundtable.privacy.ftrl import BandedFTRL, CorrelatedNoise, best_bands, eligible, prefix_error
from roundtable.privacy.ledger import Budget, Entry, Spent, check, hold, reserved, spent
from roundtable.privacy.levels import charges, ftrl_plan, noise_for
from roundtable.privacy.mechanisms import NoisyVector, add_gaussian, local_gaussian
from roundtable.privacy.noise import NoiseSource, SecureNoise, SeededNoise
from roundtable.privacy.plan import PrivacyPlan, plot, privacy_plan, render, weak_signal
from roundtable.privacy.sampling import SamplingModel, accountant_for
from roundtable.privacy.secure_round import SecureMean, SecureRound, distributed_noise
from roundtable.privacy.statement import account_statement, statement
from roundtable.privacy.tree import TreeFTRL

__all__ = [
    "AdaptiveClip",
    "Audit",
    "BandedFTRL",
    "Budget",
    "CentralDP",
    "CentralResult",
    "Charge",
    "Clipped",
    "CorrelatedNoise",
    "DistributedDP",
    "Entry",
    "NoiseSource",
    "NoisyVector",
    "PrivacyConfig",
    "PrivacyPlan",
    "RowMatrix",
    "SamplingModel",
    "SecureMean",
    "SecureNoise",
    "SecureRound",
    "SeededNoise",
    "Spent",
    "TreeFTRL",
    "account_statement",
    "accountant_for",
    "add_gaussian",
    "best_bands",
    "charges",
    "check",
    "check_delta",
    "clip",
    "clip_per_layer",
    "compose",
    "decode",
    "discrete_gaussian",
    "distributed_noise",
    "eligible",
    "encode",
    "ftrl_plan",
    "gaussian_charge",
    "hold",
    "l2_norm",
    "local_gaussian",
    "local_gaussian_charge",
    "merged",
    "noise_for",
    "one_run_audit",
    "plot",
    "prefix_error",
    "privacy_plan",
    "relation_of",
    "render",
    "reserved",
    "skellam",
    "solve_noise",
    "solve_steps",
    "spent",
    "statement",
    "weak_signal",
]

"""Differential privacy: bounding, noise, and the account of what has been spent.

Pure code: no network, no database. Importing this is cheap; accountants, Opacus and plots are loaded
by the functions that need them.
"""

from roundtable.privacy.accounting.accountants import LEAST_DRAWN_NOISE, compose, merged, relation_of
from roundtable.privacy.accounting.calibration import solve_noise, solve_steps
from roundtable.privacy.accounting.charge import Charge, gaussian_charge, local_gaussian_charge
from roundtable.privacy.accounting.delta import check_delta
from roundtable.privacy.accounting.dp_sgd_charge import step_charge
from roundtable.privacy.accounting.group_privacy import group_epsilon
from roundtable.privacy.accounting.ledger import Budget, Entry, Spent, check, hold, reserved, spent
from roundtable.privacy.accounting.sampling import SamplingModel, accountant_for
from roundtable.privacy.levels import (
    central_noise,
    charges,
    correlated_noise,
    distributed_noise,
    example_charge,
    example_training,
    noise_for,
    sampling_of,
    shared_noise,
    sums_charge,
    sums_charges,
)
from roundtable.privacy.mechanisms.central_noise import CentralDP, CentralResult, RowMatrix
from roundtable.privacy.mechanisms.clipping import AdaptiveClip, Clipped, clip, clip_per_layer, l2_norm
from roundtable.privacy.mechanisms.discrete import discrete_gaussian, skellam
from roundtable.privacy.mechanisms.distributed import DistributedDP, decode, encode
from roundtable.privacy.mechanisms.factorise import Banded, Buffered
from roundtable.privacy.mechanisms.ftrl import CorrelatedNoise, MatrixMechanism, eligible, prefix_error
from roundtable.privacy.mechanisms.gaussian_mechanism import NoisyVector, add_gaussian, local_gaussian
from roundtable.privacy.mechanisms.noise import NoiseSource, SecureNoise, SeededNoise
from roundtable.privacy.mechanisms.tree import TreeFTRL
from roundtable.privacy.plan import PrivacyPlan, plot, privacy_plan, render, weak_signal
from roundtable.privacy.released_sums import sums_noise
from roundtable.privacy.secure_round import SecureMean, SecureRound, fewest_survivors, subject_of
from roundtable.privacy.shared_sample import most_summed, values_masked, why_not_masked
from roundtable.privacy.statement import account_statement, statement

__all__ = [
    "LEAST_DRAWN_NOISE",
    "AdaptiveClip",
    "Banded",
    "Budget",
    "Buffered",
    "CentralDP",
    "CentralResult",
    "Charge",
    "Clipped",
    "CorrelatedNoise",
    "DistributedDP",
    "Entry",
    "MatrixMechanism",
    "NoiseSource",
    "NoisyVector",
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
    "central_noise",
    "charges",
    "check",
    "check_delta",
    "clip",
    "clip_per_layer",
    "compose",
    "correlated_noise",
    "decode",
    "discrete_gaussian",
    "distributed_noise",
    "eligible",
    "encode",
    "example_charge",
    "example_training",
    "fewest_survivors",
    "gaussian_charge",
    "group_epsilon",
    "hold",
    "l2_norm",
    "local_gaussian",
    "local_gaussian_charge",
    "merged",
    "most_summed",
    "noise_for",
    "plot",
    "prefix_error",
    "privacy_plan",
    "relation_of",
    "render",
    "reserved",
    "sampling_of",
    "shared_noise",
    "skellam",
    "solve_noise",
    "solve_steps",
    "spent",
    "statement",
    "step_charge",
    "subject_of",
    "sums_charge",
    "sums_charges",
    "sums_noise",
    "values_masked",
    "weak_signal",
    "why_not_masked",
]

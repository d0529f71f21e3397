"""What each key of `[policy]` that is set guarantees, against whom, and what it lacks for that."""

from __future__ import annotations

from dataclasses import dataclass

from roundtable.client.policy.policy_table import PolicyTable
from roundtable.client.policy.privacy_rules import LARGEST_DELTA


@dataclass(frozen=True)
class RuleGuarantee:
    """A key, what it guarantees against whom, and what it lacks for that; "" if nothing."""

    key: str
    sentence: str
    gap: str = ""


_SENTENCES = {
    "secure_aggregation": "against the coordinator and other silos: only sums over the cohort become known",
    "epsilon": "against everybody: what leaves for all jobs together, by noise that silos add and the silo's "
    "own account; under 'distributed' while no more silos collude than the job's privacy.corruption",
    "stated_epsilon": "by the coordinator's word: what it promises to spend over all jobs whose noise it "
    "adds; against everybody: no job without a guarantee",
    "client_level_epsilon": "against everybody: whether this silo took part in a job, by noise that silos "
    "add; under 'distributed' while no more silos collude than the job's privacy.corruption",
    "example_level_epsilon": "against everybody: one record of this silo in a job, by its own noise",
    "minimum_cohort": "against the coordinator, under secure aggregation: sums over fewer silos are not "
    "unmasked with this silo's help; in the clear only what the job states",
    "identities": "against a coordinator that invents silos, under secure aggregation only",
    "submitters": "against a coordinator that invents jobs: the submitter's key, or its own word for token: "
    "and oidc: names",
    "approval": "against everybody: no job runs that nobody here has read",
    "rounds": "against the coordinator: the silo's own ledger counts what left for each job",
    "relay_sums": "against the relays on this silo's way: none puts a sum of its own making in its place",
    "regional_models": "against relays that are not named: no model of theirs is trained from; a named one "
    "may show any model between two rounds that go up, under its signature",
    "bases": "against whoever submits jobs: rt.HuggingFaceTask and rt.HuggingFaceClassifier read their base "
    "there or in the cache alone; other code of a task is not held to it",
    "metrics": "against the coordinator: no metric leaves, and nothing that a loss can be told from exactly",
}


def guarantees(policy: PolicyTable) -> list[RuleGuarantee]:
    """One for each key that is set and whose promise needs words, in the order of the table above."""
    given = policy.model_dump(exclude_unset=True, exclude_defaults=True)
    return [
        RuleGuarantee(key, sentence, _gap(policy, key))
        for key, sentence in _SENTENCES.items()
        if key in given
    ]


def _gap(policy: PolicyTable, key: str) -> str:
    """What else has to be set before the key guarantees anything."""
    if key in ("minimum_cohort", "identities") and not policy.secure_aggregation:
        return (
            "jobs without secure aggregation are let through, and for them the coordinator's word is all "
            "there is; set secure_aggregation = true"
        )
    if key == "stated_epsilon":
        return (
            "the silo's bare update reaches the coordinator, and whether the noise was added it cannot check"
        )
    if key.endswith("epsilon") and policy.delta is None:
        return f"jobs may choose any delta up to {LARGEST_DELTA:g}; set delta below 1 / the number protected"
    if key == "submitters" and any(":" in name for name in policy.submitters or ()):
        return "names with token: or oidc: count by the coordinator's word; list names that have a key"
    return ""

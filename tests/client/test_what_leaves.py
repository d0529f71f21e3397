"""Everything that an agent can send, field by field: a new field must be judged here before it passes."""

from __future__ import annotations

import pytest

from roundtable.proto import agent_pb2

# Facts about the machine, the software or the protocol, fixed texts, and what the coordinator said before.
PUBLIC = {
    "Hello": {
        "version", "protocol", "tasks", "metadata", "devices", "clock", "spooled", "identity",
        "coordinator", "seen", "installation",
    },
    "Heartbeat": {"state"},
    "Accepted": {"step"},
    "Progress": {"step", "activity"},
    "Failure": {"step", "kind"},
    "Trouble": {"step", "kind", "action"},
    "Evaluated": {"step"},
    "Reply": {"step"},
    "Goodbye": {"reason"},
    "UploadHeader": {"step", "content", "layout", "encoding", "offset", "announcement"},
}  # fmt: skip
# Depends on data. Absent, constant or refused where a job is private; which test shows it.
JUDGED = {
    ("Progress", "done"): "steps and examples of a schedule; nothing is reported where a job is private",
    ("Progress", "total"): "the same",
    ("Progress", "figures"): "the same",
    ("Progress", "loss"): "test_private_federation, test_private_training",
    ("Failure", "detail"): "fixed sentences; figures of budgets stay: test_private_federation",
    ("Trouble", "detail"): "the same sentences",
    ("Evaluated", "metrics"): "refused unless the test data are public: test_agent, test_join",
    ("Reply", "payload"): "masked by secure aggregation: test_secure",
    ("UploadHeader", "examples"): "1 where silos protect themselves: test_private_training, test_join",
    ("UploadHeader", "metrics"): "none where silos protect themselves: test_private_training, test_join",
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_field_that_leaves_is_judged(name: str) -> None:
    fields = {field.name for field in getattr(agent_pb2, name).DESCRIPTOR.fields}
    judged = {field for message, field in JUDGED if message == name}
    assert fields == PUBLIC[name] | judged


def test_no_message_of_an_agent_is_missing_here() -> None:
    kinds = {field.name: field.message_type for field in agent_pb2.FromAgent.DESCRIPTOR.fields}
    assert {name for name, kind in kinds.items() if kind is None} == {"proof"}, "a signature, of no data"
    sent = {kind.name for kind in kinds.values() if kind is not None}
    assert sent | {"UploadHeader"} == set(PUBLIC)

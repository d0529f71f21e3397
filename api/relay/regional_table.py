"""`[regional]` of relay.toml: for which jobs this relay runs rounds within its region."""

from __future__ import annotations

from pydantic import Field

from roundtable.core.config import JobConfig
from roundtable.core.errors import IdentityError
from roundtable.core.identity.signing import check_submission, job_values, signed_request
from roundtable.core.toml_tables import Table
from roundtable.proto import common_pb2


class RegionalTable(Table):
    """What a relay lets jobs do between two rounds that go up; without the table it runs no such rounds."""

    submitters: list[str] | None = Field(
        None, description="whose jobs, by the name under which they are signed; default: anybody's"
    )
    least_silos: int = Field(
        3,
        ge=1,
        description="silos whose updates a round within the region needs: from fewer its model tells their "
        "silos more of each other",
    )
    most_rounds: int = Field(10, ge=1, description="rounds on end that may stay within the region")

    def objection(self, job: JobConfig, config: str, submission: common_pb2.Submission, ca: bytes) -> str:
        """Why this relay runs no rounds within its region for a job; "" if it does. `ca` is the root's
        certificate."""
        longest = min(job.regions.rounds, job.rounds) - 1
        if longest > self.most_rounds:
            return (
                f"the job has {longest} rounds on end within a region, and this relay allows "
                f"{self.most_rounds} ([regional] most_rounds)"
            )
        if self.submitters is None:
            return ""
        submitter = str(submission.submitter)
        if submitter not in self.submitters:
            return f"{submitter!r} is none of those whose jobs this relay serves so ([regional] submitters)"
        request, _ = signed_request(submission.request_id, bool(job.queue.repeat))
        values = job_values(
            config,
            submission.initial_model,
            request,
            submitter=submitter,
            coordinator=submission.coordinator,
            time=submission.time,
        )
        try:
            check_submission(submission.certificate, ca, values, submission.signature, submitter)
        except (IdentityError, ValueError) as error:
            return f"whose job it is is not proven ([regional] submitters): {error}"
        return ""

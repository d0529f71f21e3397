"""Jobs as an operator is shown them, with the sizes of their models."""

from __future__ import annotations

from roundtable.proto import operator_pb2
from roundtable.server.auth.access import principal
from roundtable.server.door import to_operators
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.store import JobRow

MOST_KNOWN = 4096


class ShownJobs:
    """Puts jobs into messages for whoever calls; a size is looked up once, however often a job is."""

    def __init__(self, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts
        self._sizes: dict[str, int] = {}

    def job(self, row: JobRow) -> operator_pb2.Job:
        """The job, as the caller of the moment may see it."""
        sizes = self.size(row.model), self.size(row.best_model)
        return to_operators.job_to(row, *sizes, row.is_of(*principal().party))

    def size(self, digest: str) -> int:
        """Bytes of an artifact; 0 where there is none."""
        if not digest:
            return 0
        known = self._sizes.get(digest)
        if known is None:
            known = self._artifacts.size(digest)
            if known is None:
                return 0
            if len(self._sizes) == MOST_KNOWN:
                self._sizes.clear()
            self._sizes[digest] = known
        return known

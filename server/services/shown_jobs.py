"""Jobs as an operator is shown them, with the sizes of their models."""

from __future__ import annotations

from roundtable.proto import operator_pb2
from roundtable.server.auth.access import principal
from roundtable.server.door import to_operators
from roundtable.server.storage.artifact_store import ArtifactStore
from roundtable.server.store import JobRow

MOST_KNOWN = 4096


class ShownJobs:
    """Puts jobs into messages for whoever calls."""

    def __init__(self, artifacts: ArtifactStore) -> None:
        self._artifacts = artifacts
        self._sizes: dict[str, int] = {}

    def job(self, row: JobRow) -> operator_pb2.Job:
        """The job, as the caller of the moment may see it."""
        return self._job(row, self.size(row.model), self.size(row.best_model))

    def followed(self, row: JobRow) -> operator_pb2.Job:
        """The same for whoever looks at it again and again: a size is looked up once, also of a model that is
        kept no more since."""
        return self._job(row, self._known(row.model), self._known(row.best_model))

    def size(self, digest: str) -> int:
        """Bytes of an artifact; 0 where there is none."""
        return (self._artifacts.size(digest) or 0) if digest else 0

    def _known(self, digest: str) -> int:
        if digest not in self._sizes:
            found = self.size(digest)
            if not found:
                return 0
            if len(self._sizes) == MOST_KNOWN:
                self._sizes.clear()
            self._sizes[digest] = found
        return self._sizes[digest]

    @staticmethod
    def _job(row: JobRow, size: int, best_size: int) -> operator_pb2.Job:
        return to_operators.job_to(row, size, best_size, row.is_of(*principal().party))

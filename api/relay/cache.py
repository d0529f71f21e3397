"""The region's models: each is downloaded once, however many silos ask for it at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

from roundtable.client.agent.connection import Link
from roundtable.client.agent.model_cache import ModelCache
from roundtable.client.door.model_names import ArtifactName


class RegionCache:
    """Keeps the newest few models in a folder; what is there was whole when it came, by its digest. In `own`
    are those that the region has made itself."""

    def __init__(self, folder: Path, keep: int, link: Link, own: Path) -> None:
        self._own = own
        self._folder = folder
        self._models = ModelCache(folder, keep)
        self._link = link
        self._coming: dict[str, asyncio.Task[Path]] = {}

    async def obtain(self, artifact: ArtifactName) -> Path:
        """The model's file. TransferError where it comes with other bytes time and again, ResourceError for
        a full disk."""
        name = f"{artifact.digest}.safetensors"
        if (own := self._own / name).is_file():
            return own
        path = self._folder / name
        if path.is_file() and artifact.digest not in self._coming:
            return path
        task = self._coming.get(artifact.digest)
        if task is None:
            task = asyncio.create_task(self._fetch(artifact))
            self._coming[artifact.digest] = task
            task.add_done_callback(lambda _: self._coming.pop(artifact.digest, None))
        # One silo that goes away does not take the others' download along.
        return await asyncio.shield(task)

    def drop(self, path: Path) -> None:
        """Forgets a model whose bytes have changed on this disk: it is downloaded again."""
        path.unlink(missing_ok=True)

    async def _fetch(self, artifact: ArtifactName) -> Path:
        return await self._models.obtain(self._link, artifact, _silent, lambda: 1)


def _silent(here: int, total: int) -> None:
    """Nobody watches a relay's downloads."""

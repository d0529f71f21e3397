"""The files of a page: by their names among those there are, never by a path."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import FileResponse, JSONResponse, Response

SHARED = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


class WebFiles:
    """Those of a page's own folder, and those that all pages share."""

    def __init__(self, folder: Path) -> None:
        found = [*sorted(SHARED.iterdir()), *sorted(folder.iterdir())]
        self._files = {path.name: path for path in found if path.suffix in TYPES}

    def answer(self, name: str) -> Response:
        """The file, which a browser asks for again each time."""
        path = self._files.get(name)
        if path is None:
            return JSONResponse({"error": "there is no such file"}, 404)
        return FileResponse(path, media_type=TYPES[path.suffix], headers={"cache-control": "no-cache"})

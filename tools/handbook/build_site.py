"""Builds the site into build/site/ and checks it: `python tools/handbook/build_site.py`, see --help."""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import shutil
import subprocess
import sys
import webbrowser
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import tree
from environments import ROOT

from handbook.built_site import faults_of
from handbook.site_sources import navigation, write_sources
from handbook.site_versions import LATEST, add, add_release, releases

VERSIONS = ROOT / "build" / "versions"
SITE = ROOT / "build" / "site"
SHIM = ROOT / "tools" / "handbook" / "iframe-worker.js"
FOREIGN_SHIM = "https://unpkg.com/iframe-worker/shim"


def build(sources: bool = True) -> Path:
    """The built site. SystemExit with what is wrong, where something is."""
    folder = write_sources() if sources else ROOT / "build" / "site-sources"
    listed = {page for _, page in navigation()}
    there = {str(file.relative_to(folder)) for file in folder.rglob("*.md")}
    if listed != there:
        raise SystemExit(
            f"mkdocs.yml: nav lacks {sorted(there - listed)}, and names {sorted(listed - there)} in vain"
        )
    tree.build()
    shutil.rmtree(SITE, ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "-f", "mkdocs.yml"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode or "No issues found" not in done.stdout + done.stderr:
        raise SystemExit(f"zensical could not build the site:\n{done.stdout}{done.stderr}")
    _search_without_a_network(SITE)
    if faults := faults_of(SITE):
        raise SystemExit("\n".join(faults))
    return SITE


def _search_without_a_network(site: Path) -> None:
    """Pages opened as files fetch a shim for their search from elsewhere; ours is beside them."""
    shutil.copy(SHIM, site / "assets" / "javascripts" / SHIM.name)
    for page in site.rglob("*.html"):
        way = os.path.relpath(site / "assets" / "javascripts" / SHIM.name, page.parent)
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(FOREIGN_SHIM, way), encoding="utf-8")


def serve(site: Path) -> None:
    """Shows the site on this machine until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 8000), handler) as server:
        print("the site: http://127.0.0.1:8000/  (Ctrl-C ends it)", flush=True)
        webbrowser.open("http://127.0.0.1:8000/")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("", flush=True)


def main() -> None:
    """Builds this tree's site, or those of several versions side by side."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", action="store_true", help="show it on this machine until Ctrl-C")
    parser.add_argument(
        "--versions",
        nargs="*",
        metavar="VERSION",
        help="add these to the versions in --into: a release's number, latest for this tree; none: all",
    )
    parser.add_argument("--into", type=Path, default=VERSIONS, help="folder of the versions, build/versions")
    said = parser.parse_args()
    shown = SITE
    if said.versions is None:
        build()
    else:
        shown = said.into
        for version in said.versions or [LATEST, *releases()]:
            print(f"building {version}", flush=True)
            if version == LATEST:
                add(build(), LATEST, shown)
            else:
                add_release(version, shown)
    print(f"{sum(1 for _ in shown.rglob('*.html'))} pages: open {shown / 'index.html'}", flush=True)
    if said.serve:
        serve(shown)


if __name__ == "__main__":
    main()

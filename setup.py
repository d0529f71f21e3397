"""Gives the build its version, and what is built a file that says its commit; all else is in setup.cfg."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

RULE = runpy.run_path(str(Path(__file__).resolve().parent / "core" / "evidence" / "release.py"))
THIS = RULE["release"]()
BUILT = RULE["written"](THIS)


class BuildPackage(build_py):
    """An editable install asks git each time; everything else carries the answer."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "roundtable", "core", "evidence", RULE["BUILT"]).write_text(BUILT)


class BuildSource(sdist):
    """A source distribution has no history."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        Path(base_dir, "core", "evidence", RULE["BUILT"]).write_text(BUILT)


setup(version=THIS.version, cmdclass={"build_py": BuildPackage, "sdist": BuildSource})

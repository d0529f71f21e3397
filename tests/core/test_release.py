"""Which release code says that it is: by tags and commits, in copies without a history, never by a guess."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from roundtable.core.evidence import release as rule
from roundtable.core.evidence.release import BUILT, NEXT, Release, of_build, of_history, written

ROOT = Path(__file__).resolve().parents[2]


class Tree:
    """A repository of one file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self("init", "--quiet")

    def __call__(self, *words: str) -> str:
        who = {
            f"GIT_{role}_{field}": "a@b" for role in ("AUTHOR", "COMMITTER") for field in ("NAME", "EMAIL")
        }
        own = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **who}
        done = subprocess.run(
            ["git", *words], cwd=self.folder, env=own, capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    def commit(self) -> Release:
        (self.folder / "file").write_text(f"{os.urandom(8).hex()}\n")
        self("add", "file")
        self("commit", "--quiet", "--message", "A change")
        return self.release()

    def release(self) -> Release:
        found = of_history(self.folder)
        assert found is not None
        assert found.commit == self("rev-parse", "HEAD")
        return found


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def test_commits_that_differ_have_versions_that_differ_and_ascend(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [tree.commit(), tree.commit()]
    tree("tag", f"v{NEXT}")
    found.append(tree.release())
    assert found[-1].version == NEXT
    found.append(tree.commit())
    assert found[-1].version.startswith(f"{NEXT}.post1+g"), "who forgets to raise NEXT still moves on"
    monkeypatch.setattr(rule, "NEXT", "9.0.0")
    found.append(tree.commit())
    assert found[-1].version == f"9.0.0.dev2+g{found[-1].commit[:12]}"
    versions = [Version(item.version) for item in found]
    assert versions == sorted(set(versions))


def test_a_changed_file_is_told_and_marks_no_release(tree: Tree) -> None:
    tree.commit()
    tree("tag", f"v{NEXT}")
    (tree.folder / "file").write_text("changed\n")
    assert tree.release().version == f"{NEXT}.post0+g{tree.release().commit[:12]}.dirty"


@pytest.mark.parametrize("tag", ["v1", "v1.0.0rc1", "vendor-0.1.0", "0.1.0"])
def test_a_tag_that_is_no_releases_counts_for_nothing(tag: str, tree: Tree) -> None:
    before = tree.commit()
    tree("tag", tag)
    assert tree.release() == before


def test_a_hook_of_another_repository_names_no_other_commit(
    tree: Tree, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tree.commit()
    other = Tree(tmp_path_factory.mktemp("other"))
    other.commit()
    monkeypatch.setenv("GIT_DIR", str(other.folder / ".git"))
    assert of_history(tree.folder) == own


def test_a_copy_says_what_its_build_wrote_and_nothing_that_it_did_not(tmp_path: Path) -> None:
    this = Release(f"{NEXT}.dev7+g0123456789ab", "0123456789ab" + 28 * "0")
    assert (of_history(tmp_path), of_build(tmp_path)) == (None, None)
    (tmp_path / BUILT).write_text(written(this))
    assert of_build(tmp_path) == this
    for strange in (
        "",
        "0.1.0\n",
        f"{this.version} main\n",
        written(this) * 2,
        f"{'9' * 51} {this.commit}\n",
    ):
        (tmp_path / BUILT).write_text(strange)
        assert of_build(tmp_path) is None, strange


def test_nothing_is_built_that_cannot_say_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "core" / "evidence").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for name in (
        "setup.py",
        "setup.cfg",
        "core/evidence/release.py",
        "tools/house.py",
        "tools/environments.py",
    ):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for words in (["setup.py", "--version"], ["tools/house.py", "version"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "nobody can tell which commit this is" in done.stderr

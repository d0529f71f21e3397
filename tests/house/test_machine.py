"""What differs between systems is asked in one room, core/machine: elsewhere nobody calls it directly."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOM = ROOT / "core/machine"
FOLDERS = [
    "api",
    "aggregation",
    "client",
    "cluster",
    "core",
    "engine",
    "privacy",
    "proto",
    "server",
    "simulation",
]
MODULES = {"fcntl", "grp", "msvcrt", "posix", "pty", "pwd", "resource", "termios"}
CALLS = {
    "os": "fork getuid geteuid getgid getloadavg killpg setsid pread preadv pwrite pwritev sched_getaffinity "
    "sysconf uname posix_fadvise sendfile splice O_DIRECT O_PATH O_RDONLY O_WRONLY O_RDWR O_DIRECTORY",
    "signal": "SIGKILL SIGHUP SIGSTOP SIGCONT SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIG_IGN",
    "socket": "AF_UNIX",
    "sys": "platform",
    "platform": "system",
}
NAMES = {f"{module}.{name}" for module, names in CALLS.items() for name in names.split()}
ALLOWED = {
    # What only a coordinator or a group of ranks does: both are refused where a system lacks it.
    "cluster/plan/links.py": "os.uname",
    "cluster/plan/model_probe.py": "os.sysconf",
    "cluster/train/orders.py": "socket.AF_UNIX os.O_PATH /proc/self/fd/",
    "server/leadership/election.py": "os.O_RDWR",
    "server/storage/blobs.py": "os.O_RDWR",
    "server/store/database.py": "os.O_RDONLY",
    "api/cli/shared/install.py": "pwd os.geteuid",
    # Texts, no bytes, or a system's own file.
    "api/cli/main.py": "os.O_WRONLY",
    "api/silo_page/beside_agent.py": "os.O_WRONLY",
    "core/identity/certificates.py": "os.O_WRONLY",
    "core/native_build.py": "os.O_RDONLY",
    # Hints, and systemd's socket, which nobody names elsewhere.
    "core/allocator.py": "sys.platform",
    "core/observability/watchdog.py": "socket.AF_UNIX",
    "simulation/reporting/usage.py": "os.sysconf",
}


def calls_of(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, what) of everything in a module that not every system has."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in NAMES:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute) and node.attr == "add_signal_handler":
            yield node.lineno, node.attr
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            if node.module in MODULES:
                yield node.lineno, str(node.module)
            named = {f"{node.module}.{name.name}" for name in node.names}
            yield from ((node.lineno, name) for name in sorted(named & NAMES))
        elif isinstance(node, ast.Constant) and str(node.value).startswith(("/proc/", "/sys/", "/dev/shm")):
            yield node.lineno, str(node.value)


def test_systems_are_asked_in_one_room() -> None:
    found, used = [], set()
    for file in (path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))):
        name = file.relative_to(ROOT).as_posix()
        if ROOM in file.parents:
            continue
        for line, what in calls_of(ast.parse(file.read_text(encoding="utf-8"))):
            if what in ALLOWED.get(name, "").split():
                used.add((name, what))
            else:
                found.append(f"{name}:{line}: {what}")
    assert not found, "ask core/machine, which knows systems without it:\n" + "\n".join(found)
    named = {(name, what) for name, whats in ALLOWED.items() for what in whats.split()}
    assert named == used, f"no longer there: {named - used}"


def test_the_look_finds_each_kind() -> None:
    text = (
        "import fcntl\nfrom os import fork\nfrom resource import getrusage\nos.killpg(1, signal.SIGKILL)\n"
        "loop.add_signal_handler(2, f)\nopen('/proc/self/statm')\n"
    )
    assert {line for line, _ in calls_of(ast.parse(text))} == set(range(1, 7))

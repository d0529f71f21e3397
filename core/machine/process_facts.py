"""What the system tells of memory, cores and users, and what it is asked to do with a process.

A figure that the system does not tell is None, never 0.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from roundtable.core.machine.optional_modules import RESOURCE

_PROC = Path("/proc")
_GROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
"""The first version of control groups says more than this where there is no limit."""
_PR_SET_PDEATHSIG = 1


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_id() -> int | None:
    """The number of the user who runs this."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def load_average() -> tuple[float, ...]:
    """Processes that ran or waited to, over one, five and fifteen minutes; empty where nobody counts."""
    return os.getloadavg() if hasattr(os, "getloadavg") else ()


def physical_memory() -> int | None:
    """Bytes of main memory."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def memory_table() -> dict[str, int]:
    """/proc/meminfo in bytes, by name; empty elsewhere than on Linux."""
    return _table("meminfo")


def _table(name: str) -> dict[str, int]:
    """The lines of a file under /proc that tell kibibytes, in bytes, by name."""
    table = {}
    for line in proc_text(name).splitlines():
        key, _, rest = line.partition(":")
        if (words := rest.split())[1:] == ["kB"]:
            table[key] = int(words[0]) << 10
    return table


def free_memory() -> int | None:
    """Bytes that this process and its children may still take."""
    free = memory_table().get("MemAvailable")
    known = [free, *(limit - min(limit, _used(group)) for group, limit in _groups().items())]
    return min((each for each in known if each is not None), default=None)


def group_limit() -> int | None:
    """The most bytes of memory that this process's control groups allow; None where none says."""
    return min(_groups().values(), default=None)


def _groups() -> dict[Path, int]:
    """The control groups that this process is in, of both versions, which limit memory, with the limit."""
    found = {}
    for line in proc_text("self/cgroup").splitlines():
        _, kinds, place = line.split(":", 2)
        if kinds in ("", "memory"):
            top = _GROUP / kinds
            path = top / place.lstrip("/")
            # In a container the path is the host's, and the group lies where the tree begins.
            for group in (path, *path.parents):
                if group == top or top in group.parents:
                    limit = _number(group, "memory.limit_in_bytes" if kinds else "memory.max")
                    if limit is not None and limit < _UNLIMITED:
                        found[group] = limit
    return found


def _used(group: Path) -> int:
    """Bytes that a group's processes hold; pages of files do not count, which the system takes back."""
    for usage, cache in (("memory.current", ""), ("memory.usage_in_bytes", "total_")):
        if (used := _number(group, usage)) is not None:
            pages = dict(line.split() for line in _text(group / "memory.stat").splitlines())
            files = (pages.get(f"{cache}{each}_file", "0") for each in ("active", "inactive"))
            return max(0, used - sum(map(int, files)))
    return 0


def _number(group: Path, name: str) -> int | None:
    text = _text(group / name).strip()
    return int(text) if text.isdecimal() else None


def held_memory() -> int | None:
    """Bytes of main memory that this process holds now, without pages of files that it maps, which the system
    may take back; where only its peak is told, the peak."""
    table = _table("self/status")
    if "RssAnon" in table:
        return table["RssAnon"] + table["RssShmem"]
    return peak_memory()


def peak_memory() -> int | None:
    """The most bytes of main memory that this process has held."""
    if RESOURCE is None:
        return None
    # Kibibytes, but on macOS bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return int(RESOURCE.getrusage(RESOURCE.RUSAGE_SELF).ru_maxrss) * unit


def memory_kills() -> int | None:
    """How many processes this machine's kernel has killed for want of memory; None if it does not say."""
    counts = [line.split()[1] for line in proc_text("vmstat").splitlines() if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else None


def proc_text(name: str) -> str:
    """A file under /proc; empty where there is none, or of a process that has just ended."""
    return _text(_PROC / name)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def proc_files(pattern: str) -> list[str]:
    """The names of files under /proc that match, for `proc_text`."""
    try:
        return [str(path.relative_to(_PROC)) for path in _PROC.glob(pattern)]
    except OSError:
        return []


def processor_flags() -> str:
    """What the processor can do, on Linux; empty elsewhere."""
    lines = proc_text("cpuinfo").splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def keep_files_private() -> None:
    """New files are for this user alone, and a crash leaves no core file, where the system has these."""
    os.umask(0o077)
    if RESOURCE is not None:
        RESOURCE.setrlimit(RESOURCE.RLIMIT_CORE, (0, 0))


def die_with_parent(parent: int) -> None:
    """Asks the kernel to end this process when its parent ends, on Linux; elsewhere a closed pipe does."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def prefer_to_be_killed() -> None:
    """If memory runs out, Linux should take this process and not the one that started it."""
    with suppress(OSError):
        (_PROC / "self" / "oom_score_adj").write_text("500", encoding="utf-8")

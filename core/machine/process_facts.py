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
    limit, used = (group_memory(name) for name in ("max", "current"))
    if free is None or limit is None or used is None:
        return free
    return min(free, max(0, limit - used))


def group_memory(name: str) -> int | None:
    """A figure of this control group's memory in bytes (`max`, `current`); None where there is none."""
    try:
        return int((_GROUP / f"memory.{name}").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


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
    try:
        return (_PROC / name).read_text(encoding="utf-8", errors="replace")
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

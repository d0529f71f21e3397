"""Loaded first by a process that forks others: the kernel ends it with its launcher, and its forks with it.

`multiprocessing` would end it by a pipe, but each fork holds that pipe open. So the launcher names itself.
"""

from __future__ import annotations

import os

from roundtable.core.machine.process_facts import die_with_parent

LAUNCHER = "ROUNDTABLE_LAUNCHER"
"""The variable that holds the launcher's process id, in the launcher and in all that it starts."""

if os.environ.get(LAUNCHER) == str(os.getppid()):
    die_with_parent(os.getppid())

"""What a process does before it becomes a service: a coordinator, or a silo's agent."""

from __future__ import annotations

import logging
import os
import resource

from roundtable.core.observability.logs import LogFormat, write_logs


def service_process(log_format: LogFormat) -> None:
    """Makes this process a service: its log has this form and begins at INFO, if --verbose asks for no more.

    Its files are for this user alone, and it leaves no core file, because its keys would be in it.
    """
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    write_logs(log_format)
    ours = logging.getLogger("roundtable")
    ours.setLevel(min(ours.getEffectiveLevel(), logging.INFO))

"""What a process does before it becomes a service: a coordinator, or a silo's agent."""

from __future__ import annotations

from collections.abc import Callable

from roundtable.core.machine.process_facts import keep_files_private
from roundtable.core.observability.log_levels import LogLevels, Verbosity
from roundtable.core.observability.logs import LogFormat, write_logs


def service_process(
    log_format: LogFormat, levels: LogLevels, read_anew: Callable[[], LogLevels] | None = None
) -> Verbosity:
    """Makes this process a service: its log has this form and begins at INFO, if --verbose asks for no more.

    `read_anew` gives the levels that the settings name now. Its files are for this user alone, and it leaves
    no core file, because its keys would be in it.
    """
    keep_files_private()
    write_logs(log_format)
    return Verbosity(levels, read_anew)

"""The coordinator service: API, sessions, storage, and the drivers of jobs."""

import os

# Read once, when torch is loaded. Threads of OpenMP that wait for work by spinning take the processor from
# the transfers: on a busy machine a round is combined three times faster without.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Vectors in pages of 2 MiB: they come and go each round, and small pages cost more than the arithmetic.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from roundtable.core.allocator import importing

with importing():
    from roundtable.server.config import ServerConfig, load_server_config
    from roundtable.server.coordinator import Coordinator, run_server

__all__ = ["Coordinator", "ServerConfig", "load_server_config", "run_server"]

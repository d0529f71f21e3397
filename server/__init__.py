"""The coordinator service: API, sessions, storage, and the drivers of jobs."""

from roundtable.server.config import ServerConfig, load_server_config
from roundtable.server.coordinator import Coordinator, run_server

__all__ = ["Coordinator", "ServerConfig", "load_server_config", "run_server"]

"""The relay: a region's coordinator to its silos, and to the coordinator the line of all of them.

It dials out, hands on what both sides sign, downloads a model once for the region, and keeps silos' updates
durably until the coordinator has them. Where a job says so, it adds them up.
"""

from roundtable.core.allocator import importing

with importing():
    from roundtable.relay.config import RelayConfig, load_relay_config
    from roundtable.relay.relay import Relay, run_relay

__all__ = ["Relay", "RelayConfig", "load_relay_config", "run_relay"]

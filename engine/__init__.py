"""The round engine: events in, actions out; the same for the coordinator and the simulation."""

from roundtable.core.observability.metric_sums import add_up, mean, means
from roundtable.engine.best_model import Best, best_after
from roundtable.engine.combining.combine import Combined, combine, try_rule
from roundtable.engine.combining.received import GroupMean, GroupMeans, Mean, Received, RegionModel, Rows
from roundtable.engine.combining.region_sums import sum_by_region
from roundtable.engine.combining.round_delta import RoundAccount
from roundtable.engine.combining.server_state import ServerState, initial_server_state
from roundtable.engine.metrics import figures
from roundtable.engine.population import NumberedClients, NumberedNames, Population, Roster
from roundtable.engine.round_engine import RoundEngine
from roundtable.engine.selection import STRATEGIES, Candidate
from roundtable.engine.state import record_from_plain, record_to_plain
from roundtable.engine.validation.round_noise import CentralNoise
from roundtable.engine.validation.round_plan import Plan, make_plan
from roundtable.engine.view import ClientView, EngineView

__all__ = [
    "STRATEGIES",
    "Best",
    "Candidate",
    "CentralNoise",
    "ClientView",
    "Combined",
    "EngineView",
    "GroupMean",
    "GroupMeans",
    "Mean",
    "NumberedClients",
    "NumberedNames",
    "Plan",
    "Population",
    "Received",
    "RegionModel",
    "Roster",
    "RoundAccount",
    "RoundEngine",
    "Rows",
    "ServerState",
    "add_up",
    "best_after",
    "combine",
    "figures",
    "initial_server_state",
    "make_plan",
    "mean",
    "means",
    "record_from_plain",
    "record_to_plain",
    "sum_by_region",
    "try_rule",
]

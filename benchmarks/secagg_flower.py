"""One round of Flower's SecAgg+ over vectors in memory, for benchmarks/secagg.py.

    pip install -r benchmarks/secagg-requirements.txt       # in an environment of its own
    python secagg_flower.py CLIENTS LENGTH DROPPED SHARES THRESHOLD

Runs under the interpreter of an environment that has Flower. Its own client functions and its own
workflow do all the work; only the grid between them is replaced, by one that calls the clients
directly. CPU seconds of the median client and of everything but the clients are printed as one line
of JSON. Dropped clients fail when the masked vectors are collected.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.client.mod.secure_aggregation.secaggplus_mod import (
    SecAggPlusState,
    _collect_masked_vectors,
    _setup,
    _share_keys,
    _unmask,
)
from flwr.common import Code, FitIns, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow, WorkflowState
from flwr.supercore.task_identity import TaskIdentity


class Grid:
    """Delivers a stage's messages to the clients in this process and times them."""

    def __init__(self, update: np.ndarray, dropped: int) -> None:
        self.parameters = ndarrays_to_parameters([update])
        self.dropped = dropped
        self.states: dict[int, Any] = {}
        self.spent: dict[int, float] = {}

    def send_and_receive(self, messages: Any, timeout: float | None = None) -> list[Any]:
        replies = []
        for message in messages:
            node = message.metadata.dst_node_id
            start = time.process_time()
            configs = dict(message.content.config_records[RECORD_KEY_CONFIGS])
            stage = configs.pop(Key.STAGE)
            lost = node <= self.dropped and stage in (Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK)
            answer = {} if lost else self._answer(node, stage, configs)
            self.spent[node] = self.spent.get(node, 0.0) + time.process_time() - start
            replies.append(_reply(node, answer, lost))
        return replies

    def _answer(self, node: int, stage: str, configs: dict[str, Any]) -> dict[str, Any]:
        state = self.states.setdefault(node, SecAggPlusState())
        state.nid = node
        if stage == Stage.SETUP:
            return _setup(state, configs)
        if stage == Stage.SHARE_KEYS:
            return _share_keys(state, configs)
        if stage == Stage.COLLECT_MASKED_VECTORS:
            return _collect_masked_vectors(state, configs, 1, self.parameters)
        return _unmask(state, configs)


def _reply(node: int, answer: dict[str, Any], lost: bool) -> Any:
    nothing = ndarrays_to_parameters([np.zeros(1, dtype=np.float32)])
    content = compat.fitres_to_recorddict(FitRes(Status(Code.OK, ""), nothing, 1, {}), True)
    content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord(answer)
    metadata = SimpleNamespace(src_node_id=node)
    return SimpleNamespace(content=content, metadata=metadata, has_error=lambda: lost, error="dropped")


class Strategy:
    """Selects every client, and keeps the mean that the workflow hands over."""

    def __init__(self, clients: int) -> None:
        self.clients = clients
        self.mean = np.zeros(0)

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> list[Any]:
        return [
            (SimpleNamespace(node_id=node), FitIns(parameters, {})) for node in range(1, self.clients + 1)
        ]

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> tuple[None, dict[str, float]]:
        self.mean = parameters_to_ndarrays(results[0][1].parameters)[0]
        return None, {}


def _context(strategy: Strategy) -> Any:
    start = ndarrays_to_parameters([np.zeros(1, dtype=np.float32)])
    state = RecordDict(
        {
            MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1}),
            MAIN_PARAMS_RECORD: compat.parameters_to_arrayrecord(start, True),
        }
    )
    manager = SimpleNamespace(num_available=lambda: strategy.clients)
    history = SimpleNamespace(add_metrics_distributed_fit=lambda **_: None)
    return SimpleNamespace(state=state, strategy=strategy, client_manager=manager, history=history)


def main() -> None:
    clients, length, dropped, shares, threshold = map(int, sys.argv[1:])
    logging.disable(logging.ERROR)
    update = (np.random.default_rng(0).normal(size=length) * 1e-4).astype(np.float32)
    grid, strategy, state = Grid(update, dropped), Strategy(clients), WorkflowState()
    context = _context(strategy)
    workflow = SecAggPlusWorkflow(
        1.0 if shares == clients else shares, threshold, max_weight=1.0, clipping_range=1.0
    )
    TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
    start = time.process_time()
    stages = ("setup_stage", "share_keys_stage", "collect_masked_vectors_stage", "unmask_stage")
    for stage in stages:
        if not getattr(workflow, stage)(grid, context, state):
            raise SystemExit(f"Flower halted in {stage}")
    everything = time.process_time() - start
    if np.abs(strategy.mean[:1000] - update[:1000]).max() > 1e-5:
        raise SystemExit("Flower's mean is wrong")
    silos = [spent for node, spent in grid.spent.items() if node > dropped]
    server = everything - sum(grid.spent.values())
    print(json.dumps({"client": statistics.median(silos), "server": server}))


if __name__ == "__main__":
    main()

"""A script of NVFLARE's client API at the second door: `flare.receive()` is the next round, `send` answers.

Written after the public documentation of NVFLARE 2.9. NVFLARE need not be installed.
"""

from __future__ import annotations

import ast
import math
import runpy
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from enum import Enum, StrEnum
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from roundtable.client.adapters.stand_ins import StandIns
from roundtable.client.join import join, join_settings
from roundtable.client.policy.config import AgentConfig
from roundtable.client.worker.script_trainer import Round
from roundtable.core.errors import TaskError
from roundtable.core.identity.credentials import load_credentials
from roundtable.core.paths import AnyPath

_STEPS = "NUM_STEPS_CURRENT_ROUND"
_log = getLogger("nvflare")


def nvflare_script(
    script: AnyPath,
    arguments: Sequence[str] = (),
    *,
    config: AgentConfig | AnyPath | None = None,
    task: str | None = None,
    tensors: bool | None = None,
) -> None:
    """Runs a script that uses `nvflare.client` as it is, until the job is over.

    `arguments` are the script's own; `config` and `task` are those of `rt.join`. Weights come as torch
    tensors where the script imports torch, else as NumPy arrays; `tensors` says which. `meta` of what is
    sent has the weight, `NUM_STEPS_CURRENT_ROUND`: without it a silo counts as 1, as in NVFLARE, and a
    warning says so. Metrics that are sent, there those of the received model, are the round's `train_`
    metrics here.

    Raises TaskError for what cannot be carried (answers without weights, NVFLARE's Lightning and Hugging Face
    patches, its executors), and what `rt.join` raises.
    """
    path = Path(script).resolve()
    if not path.is_file():
        raise TaskError(f"there is no script {path}")
    settings = join_settings(config)
    site = load_credentials(settings.credentials).name
    as_tensors = _imports_torch(path) if tensors is None else tensors
    rounds = cast("Any", join(settings, task=task))
    with closing(rounds), _as_main(path, arguments):
        session = FlareSession(rounds, site, as_tensors)
        with _modules(session).placed():
            try:
                runpy.run_path(str(path), run_name="__main__")
            except ModuleNotFoundError as error:
                if not (error.name or "").startswith("nvflare"):
                    raise
                raise TaskError(
                    f"{path.name}: {error.name} cannot be carried over: the adapter knows nvflare.client, "
                    "its FLModel and its SummaryWriter"
                ) from error


class ParamsType(StrEnum):
    """Whether params are weights or a difference of them."""

    FULL = "FULL"
    DIFF = "DIFF"


class AnalyticsDataType(Enum):
    """What kind of value is logged."""

    SCALAR = "SCALAR"
    SCALARS = "SCALARS"
    TEXT = "TEXT"
    PARAMETER = "PARAMETER"
    METRIC = "METRIC"


class FLModel:
    """What is received and sent."""

    def __init__(
        self,
        params_type: ParamsType | str | None = None,
        params: Any = None,
        optimizer_params: Any = None,
        metrics: Mapping[str, Any] | None = None,
        start_round: int | None = 0,
        current_round: int | None = None,
        total_rounds: int | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        if params_type is not None and params is None:
            raise ValueError(f"params must be provided when params_type is {params_type}")
        self.params_type = ParamsType.FULL if params_type is None else ParamsType(params_type)
        self.params = params
        self.optimizer_params = optimizer_params
        self.metrics = metrics
        self.start_round = start_round
        self.current_round = current_round
        self.total_rounds = total_rounds
        self.meta = {} if meta is None else meta


class FlareSession:
    """`nvflare.client` over the rounds of `join`: its methods are that module's functions."""

    def __init__(self, rounds: Iterator[Round], site: str, tensors: bool) -> None:
        self._rounds = rounds
        self._site = site
        self._tensors = tensors
        self._started = False
        self._over = False
        self._warned = False
        self._round: Round | None = None
        self._model: FLModel | None = None

    def init(self, rank: int | str | None = None, config_file: str | None = None) -> None:
        """Once, before all else."""
        if rank not in (None, 0, "0"):
            raise TaskError(
                f"flare.init(rank={rank!r}): one process joins a round; a silo's cluster runs a Task"
            )
        self._started = True

    def is_running(self) -> bool:
        """Whether there is a model to work on; waits for it."""
        self._await()
        return self._round is not None

    def receive(self, timeout: float | None = None) -> FLModel | None:
        """The round's model, the same one until something is sent; None once the job is over."""
        if timeout is not None:
            _log.warning("flare.receive(timeout=%s): waits for the next round without a limit here", timeout)
        self._await()
        current = self._round
        if current is not None and self._model is None:
            params: Any = current.weights if self._tensors else current.arrays
            number = current.number - 1
            meta = {"job_id": current.job, "site_name": self._site}
            self._model = FLModel("FULL", params, None, None, 0, number, current.rounds, meta)
        return self._model

    def send(self, model: FLModel, clear_cache: bool = True) -> None:
        """Answers the round."""
        if not isinstance(model, FLModel):
            raise TypeError("model needs to be an instance of FLModel")
        current = self._round
        if current is None or self._model is None:
            raise RuntimeError("flare.send() before flare.receive()")
        if not model.params:
            raise TaskError(
                "flare.send() without params: an answer here is weights; metrics may come with them"
            )
        weights = model.params
        if model.params_type is ParamsType.DIFF:
            weights = _added(current.arrays, weights)
        metrics = {name: float(value) for name, value in (model.metrics or {}).items()}
        current.submit(weights, examples=self._examples(model), metrics=metrics)
        if clear_cache:
            model.params = None
            self._model.params = None
        self._round, self._model = None, None

    def is_train(self) -> bool:
        """Always: other work is not asked of scripts here."""
        return True

    def is_evaluate(self) -> bool:
        """Never."""
        return False

    def is_submit_model(self) -> bool:
        """Never."""
        return False

    def system_info(self) -> dict[str, str]:
        """The silo's name, and the job's once a model was received."""
        return {"site_name": self._site, "job_id": self.get_job_id()}

    def get_site_name(self) -> str:
        """The silo's name, as its certificate has it."""
        return self._site

    def get_job_id(self) -> str:
        """The job's identifier, "" between rounds."""
        return "" if self._round is None else self._round.job

    def get_task_name(self) -> str:
        """The kind of work."""
        return "train"

    def get_config(self) -> dict[str, Any]:
        """The job's `[algorithm]` table."""
        return {} if self._round is None else dict(self._round.options)

    def log(self, key: str, value: Any, data_type: Any = None, **more: Any) -> None:
        """Into this process's log; it does not travel."""
        _log.info("%s = %s", key, value)

    def shutdown(self) -> None:
        """Leaves the federation."""
        self._over = True
        self._round = None

    def _await(self) -> None:
        if not self._started:
            raise RuntimeError("call flare.init() first")
        if self._round is not None and not self._round.wanted:
            # The round went on without this silo, or the job is over.
            self._round, self._model = None, None
        if self._round is None and not self._over:
            self._round = next(self._rounds, None)
            self._over = self._round is None

    def _examples(self, model: FLModel) -> int:
        steps = model.meta.get(_STEPS)
        if steps is None:
            if not self._warned:
                _log.warning('the script sends no meta["%s"]: this silo counts as 1 in every mean', _STEPS)
            self._warned = True
            return 1
        number = float(steps)
        if not math.isfinite(number) or number < 1 or number != int(number):
            raise TaskError(f'meta["{_STEPS}"] is {steps!r}; it must be a whole number of at least 1')
        return int(number)


class SummaryWriter:
    """`nvflare.client.tracking.SummaryWriter`: into this process's log."""

    def add_scalar(self, tag: str, scalar: float, global_step: int | None = None, **more: Any) -> None:
        """One number."""
        _log.info("%s = %s at %s", tag, scalar, global_step)

    def add_scalars(self, tag: str, scalars: Mapping[str, float], global_step: int | None = None) -> None:
        """Several."""
        for name, value in scalars.items():
            self.add_scalar(f"{tag}/{name}", value, global_step)


def _modules(session: FlareSession) -> StandIns:
    own = {name: getattr(session, name) for name in dir(FlareSession) if not name.startswith("_")}
    model = {"FLModel": FLModel, "ParamsType": ParamsType}
    names: dict[str, dict[str, Any]] = {
        "nvflare": {},
        "nvflare.client": {**own, **model, "AnalyticsDataType": AnalyticsDataType},
        "nvflare.client.api": own,
        "nvflare.client.tracking": {"SummaryWriter": SummaryWriter},
        "nvflare.client.lightning": {},
        "nvflare.client.hf": {},
        "nvflare.apis": {},
        "nvflare.apis.analytix": {"AnalyticsDataType": AnalyticsDataType},
        "nvflare.app_common": {},
        "nvflare.app_common.abstract": {},
        "nvflare.app_common.abstract.fl_model": model,
    }
    instead = {
        "nvflare.client.tracking": "its SummaryWriter writes to the log; trackers are the coordinator's",
        "nvflare.client.lightning": "call receive() and send() around trainer.fit()",
        "nvflare.client.hf": "rt.HuggingFaceTask and rt.HuggingFaceClassifier fine-tune pretrained models",
    }
    return StandIns("nvflare", names, instead, "the adapter knows the client API's functions and FLModel")


def _added(start: Mapping[str, np.ndarray], difference: Mapping[str, Any]) -> dict[str, np.ndarray]:
    plain = {
        name: value.detach().cpu().numpy() if isinstance(value, Tensor) else np.asarray(value)
        for name, value in difference.items()
    }
    return {name: value + plain[name] if name in plain else value for name, value in start.items()}


def _imports_torch(path: Path) -> bool:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        raise TaskError(f"{path}, line {error.lineno}: {error.msg}") from error
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return any(name.partition(".")[0] == torch.__name__ for name in names)


@contextmanager
def _as_main(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    before, places = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, places

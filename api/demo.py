"""The demonstration: a coordinator and three agents on this machine train one model for real.

Every party is a process of its own with its own credentials and its own folder; the silos' shards
of scikit-learn's handwritten digits are split as the example's [simulation] table says, so that
`roundtable simulate` on the same job file gives the same.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roundtable.child_processes import Children
from roundtable.core.errors import ConfigError, ResourceError, UnavailableError
from roundtable.core.extras import lacking
from roundtable.core.identity.credentials import create_ca, issue
from roundtable.core.machine.possible import must_be_possible
from roundtable.starters import BUILT_EXAMPLES

if TYPE_CHECKING:
    from roundtable.core.config import JobConfig
    from roundtable.operator import OperatorClient
    from roundtable.preparation import Prepared
    from roundtable.proto.operator_pb2 import JobDetail

_MARKER = ".roundtable-demo"
_START_SECONDS = 120.0
_TOKEN_SECONDS = 86400.0
SILOS = 3
HOST = "127.0.0.1"


@dataclass(frozen=True)
class DemoResult:
    """What came out: accuracies on all silos' test data, and where things are."""

    accuracy: float
    centralised: float
    model: Path
    curve: Path | None
    task: Path
    history: list[Mapping[str, Any]]


NEEDS = ("alembic", "fsspec", "sklearn", "sqlalchemy")
"""Libraries beside those of every installation: the coordinator's, and the one that has the digits."""


class Demo:
    """One demonstration in `folder`, which is made anew."""

    def __init__(
        self, folder: Path, overrides: Mapping[str, Any] | None = None, page: str | None = None
    ) -> None:
        """`page`: host:port at which the coordinator shows its page to browsers of this machine."""
        self._page = page
        self.folder = folder.absolute()
        self.example = BUILT_EXAMPLES["digits"].folder
        self._overrides = dict(overrides or {})
        self._address = ""
        # The names and the number that the simulation of the same job file uses.
        self._silos = [self.folder / "silos" / f"client-{index}" for index in range(SILOS)]

    def run(
        self,
        follow: Callable[[OperatorClient, str], None],
        say: Callable[[str], None],
        shown: Callable[[str], None] = lambda link: None,
        done: Callable[[DemoResult], None] = lambda result: None,
    ) -> DemoResult:
        """Runs it; `follow` shows the job until it ends, `say` takes sentences on what is being done.

        `shown` takes the address that opens the page, where there is one; `done` is called at the end, while
        the coordinator still runs. All processes have ended when this returns or raises.
        """
        must_be_possible("a coordinator")
        gone, command = lacking(*NEEDS)
        if gone:
            raise ConfigError(f"the demonstration needs {', '.join(gone)}: {command}")
        _clear(self.folder)
        with Children(self.folder / "logs") as children:
            say("Making certificates, starting a coordinator and its agents")
            self._start_coordinator(children)
            self._start_agents(children)
            say("Giving each silo its own shard of the handwritten digits")
            prepared = self._prepare()
            self._write_shards(prepared.job)
            say(f"Waiting for the agents to connect to {self._address}")
            with self._operator() as operator:
                await_agents(operator, children, len(self._silos))
                if self._page is not None:
                    shown(f"http://{self._page}/sign-in#{self._token()}")
                detail = self._train(operator, children, prepared, follow)
                model = self.folder / "model.safetensors"
                operator.get_artifact(detail.job.model.digest, detail.job.model.size, model)
            say("Training centrally on all silos' data, to compare")
            history = [json.loads(record) for record in detail.history]
            (self.folder / "history.json").write_text(json.dumps(history, indent=1))
            centralised = self._centralised(prepared)
            accuracies = [_accuracy(record) for record in history]
            curve = _plot(self.folder / "learning_curve.png", accuracies, centralised)
            task = self.example / "digits.py"
            result = DemoResult(accuracies[-1], centralised, model, curve, task, history)
            done(result)
        return result

    def _token(self) -> str:
        """A viewer's token for the page."""
        from roundtable.administration import Administrator

        with Administrator(self._address, self.folder / "admin") as admin:
            return str(admin.create_token("demo", "viewer", _TOKEN_SECONDS).token)

    def _start_coordinator(self, children: Children) -> None:
        authority = self.folder / "ca"
        create_ca(authority, "Roundtable demo CA")
        issue(authority, "coordinator", "coordinator", self.folder / "coordinator", [HOST, "localhost"])
        issue(authority, "demo", "operator", self.folder / "operator")
        issue(authority, "demo-admin", "admin", self.folder / "admin")
        self._address = f"{HOST}:{free_port()}"
        options = ["--listen", self._address, "--state", str(self.folder / "coordinator" / "state")]
        if self._page is not None:
            # Without HTTPS, on this machine itself: no browser knows the demonstration's own authority.
            file = self.folder / "coordinator.toml"
            file.write_text(f'[dashboard]\nlisten = "{self._page}"\ntls = false\n', encoding="utf-8")
            options = [str(file), *options]
        children.start("coordinator", ["server", *options, "--credentials", str(self.folder / "coordinator")])

    def _start_agents(self, children: Children) -> None:
        """Before anything that takes time here: the processes need seconds to load PyTorch."""
        for silo in self._silos:
            issue(self.folder / "ca", silo.name, "agent", silo / "credentials")
            config = silo / "agent.toml"
            config.write_text(self._agent_toml(silo), encoding="utf-8")
            children.start(silo.name, ["client", "--config", str(config)])

    def _prepare(self) -> Prepared:
        from roundtable.preparation import prepare

        return prepare(self.example / "job.toml", self._overrides)

    def _write_shards(self, job: JobConfig) -> None:
        import numpy as np

        from roundtable.simulation.world.partition import make_partition

        images, labels = _digits()
        partition = make_partition(job.simulation.partition, job.seed, self.example)
        for index, silo in enumerate(self._silos):
            rows = partition(labels, index, len(self._silos))
            np.savez(silo / "digits.npz", images=images[rows], labels=labels[rows])

    def _agent_toml(self, silo: Path) -> str:
        task, data = json.dumps(f"{self.example / 'digits.py'}:Digits"), json.dumps(str(silo / "digits.npz"))
        return (
            f'coordinator = "{self._address}"\ncredentials = "credentials"\nstate = "state"\n\n'
            f"[tasks]\ndigits = {task}\n\n[data]\ndigits = {data}\n"
        )

    def _operator(self) -> OperatorClient:
        from roundtable.operator import OperatorClient

        return OperatorClient(self._address, self.folder / "operator")

    def _train(
        self,
        operator: OperatorClient,
        children: Children,
        prepared: Prepared,
        follow: Callable[[OperatorClient, str], None],
    ) -> JobDetail:
        from roundtable.core.models import save_model

        initial = self.folder / "initial.safetensors"
        save_model(initial, prepared.model)
        try:
            job = operator.submit(prepared.job, initial)
            follow(operator, job.id)
            detail = operator.job(job.id)
        except UnavailableError:
            children.check()
            raise
        if detail.job.status != "finished":
            raise ResourceError(
                f"the demonstration's job is {detail.job.status}: {detail.job.reason}; "
                f"see the logs in {self.folder / 'logs'}"
            )
        return detail

    def _centralised(self, prepared: Prepared) -> float:
        """Test accuracy of the same task trained on all silos' data in one place, with as many passes."""
        from roundtable.client.training.evaluation import evaluate
        from roundtable.client.training.local_training import train
        from roundtable.client.training.local_work import LocalWork
        from roundtable.core.task import Site, Task
        from roundtable.simulation.backends.sequential import one_thread

        task, job, layout = prepared.task, prepared.job, prepared.model.layout
        assert isinstance(task, Task)
        sites = [Site(silo.name, options={"digits": silo / "digits.npz"}) for silo in self._silos]
        data = [task.data(site) for site in sites]
        train_set = _union([train for train, _ in data])
        test_set = _union([test for _, test in data])
        module = task.model()
        everything = _with_epochs(job, job.rounds * job.algorithm.passes)
        start = prepared.model.vector
        with one_thread():
            update = train(task, module, train_set, LocalWork(everything, layout, start, 1, "everything"))
            sums = evaluate(task, module, test_set, layout, start + update.delta)
        correct, total = sums["accuracy"]
        return correct / total


def _clear(folder: Path) -> None:
    """An empty folder at this place; only what an earlier demonstration left is removed."""
    try:
        if folder.exists() and any(folder.iterdir()):
            if not (folder / _MARKER).is_file():
                raise ConfigError(f"{folder} is not empty and no earlier demonstration; choose another --dir")
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _MARKER).touch()
    except OSError as error:
        raise ResourceError(f"{folder} cannot be used: {error.strerror}; choose another --dir") from error


def free_port() -> int:
    """A port of the loopback address that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _digits() -> Any:
    datasets = import_module("sklearn.datasets")
    images, labels = datasets.load_digits(return_X_y=True)
    return images.astype("uint8"), labels.astype("uint8")


def await_agents(operator: OperatorClient, children: Children, wanted: int) -> None:
    """Returns once so many agents are online; UnavailableError if they do not come in time."""
    until = time.monotonic() + _START_SECONDS
    online = 0
    while time.monotonic() < until:
        children.check()
        try:
            online = operator.status().clients_online
        except UnavailableError:
            online = 0
        if online >= wanted:
            return
        time.sleep(0.1)
    raise UnavailableError(f"only {online} of {wanted} agents connected within {_START_SECONDS:g} s")


def _with_epochs(job: JobConfig, epochs: int) -> JobConfig:
    algorithm = job.algorithm.model_copy(update={"epochs": epochs})
    return job.model_copy(update={"algorithm": algorithm})


def _union(parts: list[Any]) -> Any:
    import torch

    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def _accuracy(record: Mapping[str, Any]) -> float:
    correct, total = record["evaluation"]["accuracy"]
    return float(correct) / int(total)


def _plot(path: Path, accuracies: list[float], centralised: float) -> Path | None:
    """The learning curve as PNG; None where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        return None
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(accuracies) + 1), accuracies, marker="o", label="federated, three silos")
    axes.axhline(centralised, linestyle="--", color="gray", label="centralised, all data in one place")
    axes.set(xlabel="round", ylabel="test accuracy", title="Handwritten digits, non-IID silos")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150)
    return path

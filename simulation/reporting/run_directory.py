"""A run on disk: what a person wants to read afterwards, and what the run needs to go on.

    job.json           the configuration with every default
    environment.json   versions, machine, backend
    history.jsonl      one line a committed round: its whole record, and the real seconds it took
    history.csv        the same as a table; written at the end, like curves.png and model.safetensors
    events.jsonl       what happened beside: failures, retries, waiting
    clients.json       what clients are called, by number; only where something names them
    state/             the last committed round: checkpoint.json names the other files; the models that
                       [keep] names, as model-ROUND.safetensors

The checkpoint is renamed into place once the files that it names are there, so that a run that is
killed at any moment goes on from its last committed round. The history may then be one line ahead.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, RoundtableError, StorageError
from roundtable.core.machine.file_locks import lock_file
from roundtable.core.models import Model, model_blocks, open_model
from roundtable.engine import Best, ServerState, record_from_plain, record_to_plain
from roundtable.engine.messages import Note, RoundRecord
from roundtable.simulation.checkpoint import Checkpoint
from roundtable.simulation.reporting.history import History
from roundtable.simulation.world.longer_runs import why_not_to_other_rounds
from roundtable.simulation.world.natural_names import NaturalNames, checked_names

_MAY_DIFFER = {"rounds", "name", "tracking"}
_MAY_DIFFER_IN_SIMULATION = {"backend", "workers", "device", "masking"}
_STOPPED = {"job_paused", "job_cancelled", "job_failed"}
QUIET = {"update_received", "update_ready"}
"""Events of which there is one for each update: nobody is told of them one by one."""


class RunDirectory:
    """One run's folder, held by one process at a time."""

    def __init__(self, path: Path, job: JobConfig, resume: bool) -> None:
        """Raises ConfigError for a folder that holds another run, StorageError where it cannot be used."""
        self.path = path
        self._keep = job.keep
        self._state = path / "state"
        try:
            self._state.mkdir(parents=True, exist_ok=True)
            self._lock = (path / "lock").open("w")
            lock_file(self._lock.fileno())
        except BlockingIOError as error:
            raise StorageError(f"{path} is in use by another process; choose another folder") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be used as a run directory: {error}") from error
        if (path / "job.json").exists():
            if not resume:
                raise ConfigError(f"{path} holds a run already; resume it, or choose another folder")
            _check_same_job(path / "job.json", job)
        _write_whole(path / "job.json", _pretty(json.loads(job.to_json())))
        self._events = (path / "events.jsonl").open("a", encoding="utf-8", buffering=1)

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RoundtableError):
            self.note(Note("job_failed", str(error)), 0.0, NaturalNames())
        self._events.close()
        self._lock.close()

    def describe(self, environment: Mapping[str, Any]) -> None:
        """Writes environment.json."""
        _write_whole(self.path / "environment.json", _pretty(environment))

    def name_clients(self, names: NaturalNames) -> None:
        """Writes clients.json."""
        if names:
            _write_whole(self.path / "clients.json", _pretty(dict(names.by_client)))

    def named_clients(self) -> NaturalNames:
        """What clients.json says. Raises StorageError where it cannot be read."""
        file = self.path / "clients.json"
        if not file.exists():
            return NaturalNames()
        try:
            said = dict(json.loads(file.read_text(encoding="utf-8")))
            return NaturalNames(dict(zip(said, checked_names([*said.values()], len(said)), strict=True)))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(
                f"{file} cannot be read: {error}; delete it, and clients have numbers"
            ) from error

    def note(self, note: Note, now: float, names: NaturalNames) -> None:
        """Appends to events.jsonl; the arrival of each update is in the history anyway."""
        if note.kind not in QUIET:
            line = {"time": now, "kind": note.kind, "round": note.round, "attempt": note.attempt}
            line["client"] = note.client
            if names and note.client:
                line["client_name"] = names.of(note.client)
            line["message"] = note.message
            self._events.write(json.dumps(line, ensure_ascii=False) + "\n")

    def commit(self, record: RoundRecord, seconds: float, checkpoint: Checkpoint, best: Best | None) -> None:
        """Makes a round durable against the death of this process; `best` is the best model with it."""
        number = record.round
        _write_blocks(self._state / f"model-{number}.safetensors", model_blocks(checkpoint.model))
        _write_blocks(self._state / f"server-{number}.safetensors", checkpoint.server.blocks())
        for index, tensors in checkpoint.local.items():
            _write_tensors(self._state / f"local-{index}-{number}.safetensors", tensors)
        with (self.path / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({"record": record_to_plain(record), "seconds": seconds}) + "\n")
        values = {"round": number, "now": checkpoint.now, "engine": checkpoint.engine}
        values["earlier"] = sorted(checkpoint.earlier)
        _write_whole(self._state / "checkpoint.json", json.dumps(values))
        self._forget(number, {*checkpoint.earlier, *([best.round] if best else ())})

    def last(self, initial: Model) -> tuple[Checkpoint, History] | None:
        """Where to go on from; None if no round is committed yet. What is later than that is removed."""
        file = self._state / "checkpoint.json"
        if not file.exists():
            (self.path / "history.jsonl").unlink(missing_ok=True)
            return None
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            number = values["round"]
            lines = (self.path / "history.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            lines = lines[:number]
            rows = [json.loads(line) for line in lines]
            history = History(
                tuple(record_from_plain(row["record"]) for row in rows), tuple(row["seconds"] for row in rows)
            )
            model = open_model(self._state / f"model-{number}.safetensors")
            server = ServerState.from_model(open_model(self._state / f"server-{number}.safetensors"))
            checkpoint = Checkpoint(values["now"], values["engine"], model, server, self._local(number))
            models = {made: self._model(made, initial).vector for made in values.get("earlier", ())}
            checkpoint = replace(checkpoint, earlier=models)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"the run in {self.path} cannot be resumed: {error!r}; start it anew"
            ) from error
        if len(history) != number or model.layout != initial.layout:
            raise StorageError(
                f"the run in {self.path} cannot be resumed: its history has {len(history)} rounds of "
                f"{number}, or the task's model is another one now; start it anew"
            )
        _write_whole(self.path / "history.jsonl", "".join(lines))
        return checkpoint, history

    def finish(self, history: History, model: Model) -> None:
        """Writes what people read: the table, the curves (where matplotlib is there), the model."""
        history.to_csv(self.path / "history.csv")
        _write_blocks(self.path / "model.safetensors", model_blocks(model))

    def models(self, done: int) -> tuple[int, ...]:
        """The rounds up to `done` whose models are kept, in order."""
        return tuple(made for made in self._models() if made <= done)

    def model(self, made: int) -> Model:
        """The model of one of them. Raises StorageError where it is gone."""
        try:
            return open_model(self._state / f"model-{made}.safetensors")
        except OSError as error:
            raise StorageError(f"the model of round {made} in {self.path} cannot be read: {error}") from error

    def _model(self, made: int, initial: Model) -> Model:
        return open_model(self._state / f"model-{made}.safetensors") if made else initial

    def _models(self) -> list[int]:
        return sorted(int(file.stem.partition("-")[2]) for file in self._state.glob("model-*.safetensors"))

    def _local(self, number: int) -> dict[int, dict[str, Tensor]]:
        """The newest tensors of each client up to round `number`."""
        newest: dict[int, int] = {}
        for index, at in self._local_files():
            if at <= number:
                newest[index] = max(at, newest.get(index, 0))
        return {
            index: load_file(self._state / f"local-{index}-{at}.safetensors") for index, at in newest.items()
        }

    def _local_files(self) -> list[tuple[int, int]]:
        """(client, round) of each file of a client's own tensors."""
        parts = [file.stem.split("-") for file in self._state.glob("local-*.safetensors")]
        return [(int(index), int(at)) for _, index, at in parts]

    def _forget(self, number: int, earlier: Collection[int]) -> None:
        """Removes what neither the checkpoint of round `number` needs nor the job keeps."""
        for made in self._models():
            if made not in (number, *earlier) and not self._keep.rounds(made):
                (self._state / f"model-{made}.safetensors").unlink()
        for file in self._state.glob("server-*.safetensors"):
            if file.stem != f"server-{number}":
                file.unlink()
        newest: dict[int, int] = {}
        for index, at in self._local_files():
            newest[index] = max(at, newest.get(index, 0))
        for index, at in self._local_files():
            if at < newest[index]:
                (self._state / f"local-{index}-{at}.safetensors").unlink()


def committed_rounds(folder: Path) -> list[RoundRecord]:
    """The rounds that a run's folder holds, for whoever shows them; none where nothing is committed yet.

    Whether the run can be resumed, `RunDirectory.last` finds out.
    """
    try:
        return [record_from_plain(json.loads(line)["record"]) for line in whole_rounds(folder)[0]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def whole_rounds(folder: Path) -> tuple[list[bytes], str]:
    """The lines of a run's history from which it would be resumed; and in words what else is there.

    A kill between history and checkpoint leaves a line too many, which may be torn. Where the folder `state`
    was removed, all lines count that are whole. Raises OSError, ValueError or KeyError for a checkpoint
    that cannot be read.
    """
    state, file = folder / "state", folder / "history.jsonl"
    committed = None
    if state.is_dir():
        checkpoint = state / "checkpoint.json"
        committed = json.loads(checkpoint.read_text("utf-8"))["round"] if checkpoint.exists() else 0
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    if committed is None:
        committed = len(lines) - (bool(lines) and not lines[-1].endswith(b"\n"))
    if len(lines) <= committed:
        return lines, ""
    what = (
        f"line {committed + 1}" if len(lines) == committed + 1 else f"lines {committed + 1} to {len(lines)}"
    )
    return lines[:committed], f"{what} of {file} left out: the run stopped before that round was committed"


def why_stopped(folder: Path) -> str:
    """Why the run of this folder stopped before its end, as its events tell; "" where it did not, or has gone
    on since."""
    try:
        lines = (folder / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return ""
    for line in reversed(lines):
        try:
            event = json.loads(line)
            kind, message = str(event["kind"]), str(event["message"])
        except (ValueError, KeyError, TypeError):
            continue
        if kind in _STOPPED:
            return message
        if kind.startswith(("job_", "round_")):
            return ""
    return ""


def _check_same_job(file: Path, job: JobConfig) -> None:
    """Raises ConfigError naming what differs between the job that a run was begun with and this one."""
    before, now = json.loads(file.read_text(encoding="utf-8")), json.loads(job.to_json())
    differing = [
        key for key in now if now[key] != before.get(key) and key not in _MAY_DIFFER | {"simulation"}
    ]
    inner = now["simulation"]
    differing += [
        f"simulation.{key}"
        for key in inner
        if inner[key] != before.get("simulation", {}).get(key) and key not in _MAY_DIFFER_IN_SIMULATION
    ]
    if differing:
        raise ConfigError(
            f"{file.parent} holds a run of another job: {', '.join(differing)} differ; "
            "resume it with the job that it was begun with, or choose another folder"
        )
    _check_rounds(file.parent, job, before["rounds"])


def _check_rounds(folder: Path, job: JobConfig, before: int) -> None:
    """Raises ConfigError where a run of `before` rounds cannot go on to as many as the job has."""
    if job.rounds == before or not (why := why_not_to_other_rounds(job)):
        return
    raise ConfigError(
        f"{folder} holds a run of {before} rounds, which cannot go on to {job.rounds}: {why}; set rounds = "
        f"{before}, or choose another folder",
        key=("rounds",),
    )


def _pretty(values: Any) -> str:
    return json.dumps(values, indent=2, ensure_ascii=False) + "\n"


def _write_whole(path: Path, text: str) -> None:
    """All of it or nothing, against the death of this process (not of the machine: nothing is synced)."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _write_blocks(path: Path, blocks: Iterable[bytes | memoryview]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        for block in blocks:
            file.write(block)
    partial.replace(path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial)
    partial.replace(path)

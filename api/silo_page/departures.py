"""What has left the silo, as its own log has it: counted, and listed one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roundtable.client.agent.gatekeeper import METRICS_SENT
from roundtable.client.agent.silo_log import NAME
from roundtable.client.sharing.line_sharing import SHARED
from roundtable.core.errors import ResourceError

_ENTRY = b'{"entry"'
ANSWERS = "answers of an analysis"
KINDS = {"sent": "update", METRICS_SENT: "figures", SHARED: "lines of the log", "report_sent": "report"}
"""What of the log's actions tells of something that leaves, and what that is called."""


@dataclass
class Departure:
    """One thing that left: `what` is one of `KINDS`, or `ANSWERS` for what an analysis sends as an update;
    `proof` what of the coordinator's receipts is here."""

    sequence: int
    time: float
    what: str
    job: str
    round: int | None = None
    attempt: int | None = None
    bytes: int | None = None
    digest: str = ""
    figures: str = ""
    proof: str = ""


class Departures:
    """The entries of the log as it is, without archives; reads only what was written since it last did."""

    def __init__(self, state: Path) -> None:
        self._path = state / NAME
        self._reset()

    def _reset(self) -> None:
        self._inode, self._offset = 0, 0
        self.all: list[Departure] = []
        self.archived = 0
        self.heard = 0.0
        """When the coordinator last asked for something or acknowledged something; Unix time."""
        self._waiting: dict[tuple[Any, ...], Departure] = {}
        self._asked: dict[tuple[str, int], str] = {}
        """What an analysis asked, by job and round."""

    def read(self) -> None:
        """Goes on to the log's end. ResourceError for a log that cannot be read."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            self._reset()
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            # Entries were archived: the log is another file now.
            self._reset()
            self._inode = status.st_ino
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    self._offset += len(line)
                    self._take(line)
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ResourceError(
                f"{self._path} cannot be read ({error}); `roundtable audit verify --silo` says what is wrong"
            ) from error

    def totals(self) -> list[dict[str, Any]]:
        """Of each job, the newest first, how often what left, how many bytes, and what is unproven."""
        jobs: dict[str, dict[str, Any]] = {}
        for one in self.all:
            row = jobs.setdefault(
                one.job,
                {
                    "job": one.job,
                    "updates": 0,
                    "answers": 0,
                    "bytes": 0,
                    "unproven": 0,
                    "figures": 0,
                    "lines": 0,
                    "reports": 0,
                },
            )
            row["last"] = one.time
            row["bytes"] += one.bytes or 0
            match one.what:
                case "update" | "answers of an analysis":
                    row["updates" if one.what == "update" else "answers"] += 1
                    row["unproven"] += not one.proof
                case "figures":
                    row["figures"] += 1
                case "report":
                    row["reports"] += 1
                case _:
                    row["lines"] += 1
        return sorted(jobs.values(), key=lambda row: -row["last"])

    def newest(self, before: int, most: int) -> list[dict[str, Any]]:
        """At most so many from before an entry of the log, the newest first."""
        return [asdict(one) for one in _before(self.all, before, most)]

    def _take(self, line: bytes) -> None:
        if not line.startswith(_ENTRY):
            if line.startswith(b'{"archive"'):
                statement = json.loads(line)["archive"]["statement"]
                self.archived = int(statement["last"])
            return
        entry = json.loads(line)["entry"]
        action, detail = str(entry["action"]), entry["detail"]
        if entry["actor"] == "coordinator" or action == "refused":
            self.heard = float(entry["time"])
        if action in ("receipt", "held", "region_receipt"):
            self._prove(action, detail)
            return
        if action == "answered":
            self._asked[str(entry["object"]), detail["round"]] = _questions(detail)
            return
        what = KINDS.get(action)
        if what is None:
            return
        made = Departure(int(entry["sequence"]), float(entry["time"]), what, str(entry["object"]))
        made.round, made.attempt = detail.get("round"), detail.get("attempt")
        if action == "sent":
            made.bytes, made.digest = detail.get("size"), str(detail["update"])
            made.figures = _figures(detail)
            if asked := self._asked.get((made.job, detail["round"]), ""):
                made.what, made.figures = ANSWERS, asked
            self._waiting[_key(detail)] = made
        elif action == METRICS_SENT:
            made.figures = _figures(detail)
            if not detail["metrics"]:
                return
        elif action == SHARED:
            texts = [str(each["text"]) for each in detail["lines"]]
            made.bytes = sum(len(text.encode()) for text in texts)
            made.figures = f"{len(texts)}: {texts[0]}" if texts else ""
        else:
            made.bytes, made.digest = detail.get("bytes"), str(detail["report"])
        self.all.append(made)

    def _prove(self, action: str, detail: Mapping[str, Any]) -> None:
        sent = self._waiting.get(_key(detail))
        if sent is None:
            return
        if action == "held":
            sent.proof = sent.proof or "held by the relay"
        else:
            word = str(detail.get("status", "receipt")).lower()
            word = f"{word} within the region" if action == "region_receipt" else word
            sent.proof = word if detail.get("signed") else f"{word}, not signed soundly"
            del self._waiting[_key(detail)]


def _key(detail: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(detail[name] for name in ("job", "round", "attempt", "update"))


def _questions(detail: Mapping[str, Any]) -> str:
    """What was asked of which table, each question with the columns and values that it names."""
    told = []
    for question in detail["questions"]:
        rest = {name: value for name, value in question.items() if name not in ("ask", "title")}
        parts = (f"{name} {_listed(value)}" for name, value in rest.items() if value not in ([], {}, ""))
        said = ", ".join(parts)
        told.append(f"{question['ask']}: {said}" if said else str(question["ask"]))
    masked = "masked" if detail["masked"] else "not masked"
    return f"{masked} sums over {detail['table']}: {'; '.join(told)}"


def _listed(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _figures(detail: Mapping[str, Any]) -> str:
    """Example count and means in one line; sums and counts are in the log."""
    found = [f"{detail['examples']} examples"] if "examples" in detail else []
    for name, (total, count) in sorted(dict(detail.get("metrics", {})).items()):
        mean = total / count if isinstance(total, float | int) and count else total
        found.append(f"{name} {mean:.4g}" if isinstance(mean, float | int) else f"{name} {mean}")
    return ", ".join(found)


def _before(all_of_them: list[Departure], before: int, most: int) -> Iterator[Departure]:
    for one in reversed(all_of_them):
        if most == 0:
            return
        if not before or one.sequence < before:
            most -= 1
            yield one

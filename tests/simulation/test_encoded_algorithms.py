"""The table of docs/compression.md: each cell runs and equals the reference, or is refused before round 1.

The reference encodes and remembers in a hook around the client's algorithm, in a job that encodes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import algorithm_table as table
import pytest
import torch
from algorithm_tasks import Normalised, Plain

from roundtable.core import JobConfig
from roundtable.core.algorithms.known_algorithms import make_algorithm
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.initial_model import job_layout
from roundtable.core.plugins.doors import import_file
from roundtable.simulation import Result, simulate

QUICK = {"fedavg", "scaffold", "scaffold, epochs", "feddyn", "qfedavg", "fedexp", "ditto", "fedbn", "cyclic"}
"""One of each way in which something stays, or travels beside the update."""
PAGE = Path(__file__).parents[2] / "docs" / "compression.md"
ORACLE = """
import torch
from dataclasses import replace
from roundtable.core.algorithms.known_algorithms import BUILTINS
from roundtable.core.encodings import StreamKey, get_encoding

UP, WAY, MOMENTUM = "{up}", "{way}", {momentum}
LAYOUT, CHOSEN = None, {{}}

class Encoded(BUILTINS["{name}"]):
    def end(self, round, update, steps):
        sent, context = super().end(round, update, steps), round.context
        names = [place.name for place in self.places if place.sent]
        parts = [sent.update, *(sent.up[name] for name in names)]
        total = torch.cat([part.flatten() for part in parts])
        old = {{key.removeprefix("oracle_"): each for key, each in round.kept.items()}}
        chain = CHOSEN.get((context.site, context.round), UP)
        key = StreamKey(context.job_seed, context.site, context.round, 1)
        encoding = get_encoding(chain).over(LAYOUT)
        memory = {{name: each for name, each in old.items() if name == "factors"}}

        def travelled(values):
            decoded = torch.empty_like(values)
            encoding.decode(b"".join(map(bytes, encoding.encode(values, key, memory))), decoded, key)
            return decoded

        zero = torch.zeros_like(total)
        if WAY == "ef21":
            arrived = old.get("g", zero) + travelled(total - old.get("g", zero))
            left = {{"g": arrived}}
        else:
            total = torch.add(total, old.get("u", zero), alpha=MOMENTUM)
            velocity, total = total, total + old.get("e", zero)
            arrived, left = travelled(total), {{}}
            if WAY == "error" and (not CHOSEN or chain.startswith("topk")):
                left["e"] = total - arrived
            if MOMENTUM:
                left["u"] = velocity.masked_fill(arrived != 0, 0.0)
        kept = {{**sent.kept, **{{"oracle_" + name: each for name, each in {{**left, **memory}}.items()}}}}
        update, *up = arrived.split([part.numel() for part in parts])
        shaped = {{name: values.view(sent.up[name].shape) for name, values in zip(names, up, strict=True)}}
        return replace(sent, update=update, up=shaped, kept=kept)
"""


def task_of(name: str) -> Plain:
    return Normalised() if name == "fedbn" else Plain()


def document_of(name: str, column: str) -> dict[str, Any]:
    document = table.document_of(name, column)
    document |= {"seed": 3, "rounds": 4}
    document["algorithm"] |= {"batch_size": 8, "learning_rate": 0.05}
    devices = {"upload": 400.0, "latency": 0.1} if "auto" in column else {}
    document["simulation"] = {"clients": 3, "backend": "sequential", "workers": 1, "devices": devices}
    return document


def run(name: str, document: dict[str, Any], folder: Path | None = None) -> Result:
    result = simulate(JobConfig.model_validate(document), task_of(name), folder=folder)
    assert result.status == "finished"
    return result


def worked_out(name: str, column: str, chosen: dict[tuple[str, int], str], folder: Path) -> Result:
    """The same job without encoding, with the reference's hook around its algorithm."""
    document = document_of(name, column)
    transfer = document.pop("transfer")
    way = transfer.get("feedback", "error" if "feedback" in column or "momentum" in column else "off")
    words = {"way": "error" if chosen else way, "momentum": transfer.get("momentum", 0.0)}
    kind = table.ROWS[name]["name"]
    file = folder / f"oracle_{len([*folder.iterdir()])}.py"
    file.write_text(ORACLE.format(up=transfer["up"], name=kind, **words))
    module: Any = import_file(file, "the reference", ConfigError)
    job = JobConfig.model_validate(document)
    algorithm = make_algorithm(job.algorithm)
    module.LAYOUT = job_layout(job, algorithm, task_of(name).model()).sent
    module.CHOSEN = chosen
    document["algorithm"] = {**document["algorithm"], "name": f"{file.name}:Encoded"}
    return run(name, document, folder)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in sorted(table.ROWS)]
)
def test_each_cell_equals_the_reference_or_is_refused(name: str, tmp_path: Path) -> None:
    plain = run(name, document_of(name, "")).model.vector
    for column, transfer in table.ENCODED.items():
        if why := table.refusal(name, column):
            with pytest.raises((ConfigError, PrivacyError)) as caught:
                run(name, document_of(name, column))
            assert str(caught.value) == why
            continue
        result = run(name, document_of(name, column))
        found = result.model.vector
        assert not torch.equal(found, plain)
        if name == "streaming":
            continue  # Its encodings are of fragments: held to a reference of its own in test_streaming.py.
        if "up" not in transfer:
            # Silos train from a model that is off by what int8 leaves out, which the next round makes good.
            assert (found - plain).norm() < 0.01 * plain.norm()
            continue
        chosen = {
            (client, record.round): figures["encoding"]
            for record in result.history.records
            for client, figures in record.transfers.items()
            if "auto" in column
        }
        expected = worked_out(name, column, chosen, tmp_path).model.vector
        if "EF21" in column:
            # The server adds means of differences, the reference takes means of sums.
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found, expected), (column, float((found - expected).abs().max()))
        if chosen and name == "fedavg":
            assert len({*chosen.values()}) > 1


def test_the_page_shows_the_table() -> None:
    assert table.encoded_markdown() in PAGE.read_text(encoding="utf-8"), (
        "run: python tools/algorithm_table.py"
    )

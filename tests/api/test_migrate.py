"""Projects of other frameworks, read and not run, become files that run here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from other_frameworks import (
    FLARE_JOB,
    FLARE_SCRIPT,
    PANDAS_CLIENT,
    TORCH_CLIENT,
    TORCH_SERVER,
    write_quickstart,
)

import roundtable as rt
from roundtable.cli.main import run
from roundtable.core.errors import ConfigError
from roundtable.migration.from_flower import migrate_flower
from roundtable.migration.from_nvflare import migrate_nvflare


def lost(outcome: object) -> list[tuple[str, int]]:
    """What was not carried, and the line."""
    return [(each.what, each.line) for each in outcome.lost]  # type: ignore[attr-defined]


def test_a_flower_project_is_read_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_quickstart(tmp_path, "migrated_start")
    assert run(["migrate", "flower", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["files"] == ["federated.py", "job.toml", "MIGRATION.md"]
    line = TORCH_SERVER.splitlines().index("    result = strategy.start(") + 1
    assert [(each["what"], each["line"]) for each in told["not_carried"]] == [("start(evaluate_fn=…)", line)]
    job = rt.load_job(tmp_path / "job.toml")
    assert (job.rounds, job.cohort.size, job.cohort.minimum, job.simulation.clients) == (3, 3, 2, 6)
    optimizer = job.aggregation.server_optimizer
    assert (optimizer.name, optimizer.learning_rate, optimizer.tau) == ("fedadam", 0.05, 0.001)
    assert "train_config={'lr': 0.05}" in (tmp_path / "federated.py").read_text()
    result = rt.simulate(tmp_path / "job.toml")
    assert (result.status, len(result.history)) == ("finished", 3)
    assert np.isfinite(result.history[2]["loss"])
    assert run(["migrate", "flower", str(tmp_path)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err


def test_what_a_flower_project_has_and_we_have_not_is_said_with_its_line(tmp_path: Path) -> None:
    client = TORCH_CLIENT.replace(
        "import torch\n", "from flwr.clientapp.mod import fixedclipping_mod\n"
    ).replace("    model = Net()\n", '    context.state["seen"] = None\n    model = Net()\n', 1)
    write_quickstart(tmp_path, "odd_start", client + '\n@app.train("tune")\ndef tune(msg, context): ...\n')
    server = tmp_path / "odd_start" / "server_app.py"
    text = server.read_text().replace(
        "FedAdam(", "DifferentialPrivacyServerSideFixedClipping(FedMedian(beta=lr), "
    )
    server.write_text(text.replace("global_model = Net()", "global_model = build(context)"))
    outcome = migrate_flower(tmp_path / "odd_start" / "client_app.py")
    assert [what for what, _ in lost(outcome)] == [
        "@app.train('tune')",
        "context.state",
        "from flwr.clientapp.mod import fixedclipping_mod",
        "DifferentialPrivacyServerSideFixedClipping",
        "start(evaluate_fn=…)",
        "the first weights (they need build, context)",
    ]
    assert all(line > 0 for _, line in lost(outcome))
    assert 'rule = "median"' in outcome.files["job.toml"]
    assert "raise NotImplementedError" in outcome.files["federated.py"]


def test_a_query_becomes_a_survey_with_the_same_figures(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    write_quickstart(tmp_path, "asking", PANDAS_CLIENT)
    config = tmp_path / "pyproject.toml"
    config.write_text(config.read_text().replace("penalty", 'selected-features = "width,height"\npenalty'))
    outcome = migrate_flower(tmp_path)
    outcome.write()
    assert lost(outcome) == []
    survey = tmp_path / "survey.toml"
    chance = np.random.default_rng(3)
    rows = {name: chance.uniform(2, 10, (40, 2)).round(3) for name in ("north", "south", "west")}
    for name, values in rows.items():
        np.savetxt(tmp_path / f"{name}.csv", values, "%.3f", ",", header="width,height", comments="")
    silos = "\n".join(f'{name} = "{name}.csv"' for name in rows)
    survey.write_text(f"{survey.read_text()}\n[silos]\n{silos}\n")
    answers = rt.analyse(survey)
    pooled = np.concatenate([*rows.values()])
    for place, column in enumerate(("width", "height")):
        counts, _ = np.histogram(pooled[:, place], bins=np.linspace(2.0, 10.0, 9))
        assert answers[f"histogram {column}"]["counts"]["all"] == counts.tolist()
        described = answers["describe"][column]["all"]
        assert described["count"] == 120
        assert described["mean"] * 120 == pytest.approx(pooled[:, place].sum(), rel=1e-9)


def test_a_flare_script_gets_its_silo_task_and_job(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(FLARE_SCRIPT)
    (tmp_path / "job.py").write_text(FLARE_JOB)
    (tmp_path / "network.py").write_text(
        "from torch import nn\nclass Network(nn.Linear):\n    def __init__(self): super().__init__(4, 3)\n"
    )
    outcome = migrate_nvflare(tmp_path)
    outcome.write()
    assert lost(outcome) == [("FedAvgRecipe(key_metric=…)", 7)]
    job = rt.load_job(tmp_path / "job.toml")
    assert (job.task.name, job.rounds, job.cohort.minimum) == ("hello_pt", 3, 2)
    compile((tmp_path / "silo.py").read_text(), "silo.py", "exec")
    assert "['--lr', '0.25'], config=sys.argv[1], task=\"hello_pt\"" in (tmp_path / "silo.py").read_text()
    assert rt.load_task("hello_pt", tmp_path, trains=False).model().weight.shape == (3, 4)  # type: ignore[union-attr]


def test_a_flare_script_alone_says_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = FLARE_SCRIPT.replace('"NUM_STEPS_CURRENT_ROUND": 12', "")
    script.write_text(
        text.replace("import SummaryWriter", "import MLflowWriter as SummaryWriter, MLflowWriter")
    )
    outcome = migrate_nvflare(script)
    assert [what for what, _ in lost(outcome)] == ["MLflowWriter", "a weight for the mean"]
    assert "return nn.Sequential(" in next(
        t for n, t in outcome.files.items() if n not in ("silo.py", "job.toml")
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [("x = 1\n", "no ClientApp"), ("def (:\n", "line 1: invalid syntax"), (None, "there is no")],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, text: str | None, said: str) -> None:
    file = tmp_path / "client.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=said):
        migrate_flower(file)

"""`roundtable client model`: the model that a silo itself uses."""

from __future__ import annotations

import json
from pathlib import Path

import click

from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import print_json, say
from roundtable.cli.silo.silo import silo_of
from roundtable.core.errors import ConfigError


@click.command("model")
@click.argument("job")
@click.option(
    "--personal",
    is_flag=True,
    help="With what the job's algorithm keeps here: Ditto's own model, FedPer's head, the tuned one.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="Default: JOB.safetensors, here."
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@json_option
@click.pass_context
def silo_model(
    context: click.Context, job: str, personal: bool, out: Path | None, force: bool, as_json: bool
) -> None:
    """Write a job's model as this silo last had it.

    JOB is its identifier, or its name where one job alone has it here. What is written is a state dict that
    PyTorch loads. Nothing is sent and the coordinator is not asked. Where the algorithm tunes the model
    before it is used, it is tuned on this silo's training data, now.
    """
    import safetensors.torch

    from roundtable.client.worker.executor import Executor
    from roundtable.client.worker.own_model import identifier_of, recall
    from roundtable.client.worker.process_settings import settings_of
    from roundtable.core.models import open_model

    config, _ = silo_of(context)
    out = out or Path(f"{job}.safetensors")
    if out.exists() and not force:
        raise ConfigError(f"{out} is there already; name another file, or replace it with --force")
    jobs = config.state / "jobs"
    client, order = recall(jobs, identifier_of(jobs, job))
    if personal or open_model(Path(order.model)).lacking:
        executor = Executor(settings_of(config, client, jobs))
        state = executor.personal(order) if personal else executor.whole(order)
    else:
        state = open_model(Path(order.model)).state_dict()
    metadata = {"job": order.job, "round": str(order.round), "silo": client, "personal": str(personal)}
    safetensors.torch.save_file({name: value.contiguous() for name, value in state.items()}, out, metadata)
    if as_json:
        print_json({"file": str(out), **metadata, "personal": personal, "round": order.round})
        return
    what = "this silo's own model" if personal else "the global model"
    say(f"{out}: {what}, as it was {_when(order.phase, order.round)} of job {order.job}. To use it:")
    say("  from safetensors.torch import load_file")
    say(f"  model.load_state_dict(load_file({json.dumps(str(out), ensure_ascii=False)}))")


def _when(phase: str, round: int) -> str:
    return f"after round {round}" if phase == "evaluate" else f"at the beginning of round {round}"

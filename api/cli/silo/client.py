"""`roundtable client`: a silo's agent."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from roundtable.cli.doctor import client_doctor
from roundtable.cli.shared.install import install
from roundtable.cli.shared.options import json_option
from roundtable.cli.shared.output import say, tell
from roundtable.cli.shared.service_process import service_process
from roundtable.cli.silo.cluster import plan, profile, report, verify_cluster
from roundtable.cli.silo.data_check import data
from roundtable.cli.silo.maintenance import drain, resume
from roundtable.cli.silo.requests import requests
from roundtable.cli.silo.shared_log import shared
from roundtable.cli.silo.silo import approve, enroll, explain, forget, hash_code, jobs, refuse
from roundtable.cli.silo.silo_model import silo_model
from roundtable.core.allocator import importing
from roundtable.core.identity.credentials import load_credentials

if TYPE_CHECKING:
    from roundtable.client.policy.config import AgentConfig
    from roundtable.client.trainer import Trainer


@click.group(invoke_without_command=True)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    default="agent.toml",
    show_default=True,
    help="The silo's settings: coordinator, credentials, tasks, data.",
)
@click.option(
    "--page",
    metavar="HOST:PORT",
    is_flag=False,
    flag_value="127.0.0.1:7446",
    help="Also serve the silo's page for a browser on this machine.  [default: 127.0.0.1:7446]",
)
@click.pass_context
def client(context: click.Context, config: Path, page: str | None) -> int | None:
    """Run a silo's agent.

    It connects to the coordinator and reconnects automatically. Ctrl-C stops it cleanly; a finished update
    that was not delivered waits on disk for the next start.
    """
    context.obj = config
    if context.invoked_subcommand is not None:
        return None
    with importing():
        from roundtable.client.policy.config import load_agent_config

    settings = load_agent_config(config)
    verbosity = service_process(
        settings.log_format, settings.log_levels, lambda: load_agent_config(config).log_levels
    )
    # What it brings along may warn: in the form of the log.
    with importing():
        from roundtable.client.agent.agent import run_agent

    with _page(config, page or settings.page):
        return run_agent(settings, _cluster_trainer(settings), verbosity, lambda: _examined(config))


def _page(config: Path, listen: str) -> AbstractContextManager[object]:
    """Without a page the agent imports no web server."""
    if not listen:
        return nullcontext()
    from roundtable.client.policy.config import load_agent_config
    from roundtable.silo_page.beside_agent import page_link, silo_page

    if sys.stdout.isatty():
        say(f"The silo's page: {page_link(listen, load_agent_config(config).state)}")
    return silo_page(lambda: load_agent_config(config), listen)


@click.command("page")
@json_option
@click.pass_context
def page_address(context: click.Context, as_json: bool) -> None:
    """Print the address that opens the silo's page.

    It holds the page's token: who has it may say yes and no for this silo. The page is there while an agent
    runs with `page` in agent.toml, or with --page.
    """
    from roundtable.client.policy.config import load_agent_config
    from roundtable.silo_page.beside_agent import ADDRESS, page_link

    config = load_agent_config(context.obj)
    address = page_link(config.page or ADDRESS, config.state)
    tell(as_json, {"address": address}, address)


def _examined(file: Path) -> list[dict[str, str]]:
    """The doctor's findings beside the running agent: no task is tried."""
    from roundtable.doctor.doctor_agent import examine_agent
    from roundtable.doctor.inquiries import answers

    return [asdict(check) for check in answers(examine_agent(file, skip_tasks=True))]


def _cluster_trainer(settings: AgentConfig) -> Trainer | None:
    """The trainer of a silo with `[cluster]`; None where the agent's own training process will do."""
    if settings.cluster is None:
        return None
    from roundtable.cluster.agent.cluster_trainer import ClusterTrainer

    name = load_credentials(settings.credentials).name
    return ClusterTrainer(settings, name, settings.state / "jobs")


for command in (
    approve,
    client_doctor,
    data,
    drain,
    enroll,
    explain,
    forget,
    hash_code,
    jobs,
    page_address,
    plan,
    profile,
    refuse,
    requests,
    report,
    resume,
    shared,
    silo_model,
    verify_cluster,
    install,
):
    client.add_command(command)

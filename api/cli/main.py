"""`roundtable`: the commands, and what becomes of their errors.

Exit codes: 0 done, 1 it failed, 2 the command line or a configuration file is wrong, 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence

import click

from roundtable.cli.analyse import analyse
from roundtable.cli.completion import completion
from roundtable.cli.coordinator.audit import audit, model
from roundtable.cli.coordinator.audit_archives import archive
from roundtable.cli.coordinator.backup import backup, restore
from roundtable.cli.coordinator.ca import ca
from roundtable.cli.coordinator.page import page
from roundtable.cli.coordinator.relay import relay
from roundtable.cli.coordinator.server import server
from roundtable.cli.coordinator.trust import invite, operators, revoke, token
from roundtable.cli.coordinator.verify_model import bundle, verify_model
from roundtable.cli.demo import demo
from roundtable.cli.doctor import doctor
from roundtable.cli.jobs.clients import clients
from roundtable.cli.jobs.job import job
from roundtable.cli.jobs.privacy import privacy
from roundtable.cli.migrate import migrate
from roundtable.cli.new import new
from roundtable.cli.shared.output import say, say_error, show_error
from roundtable.cli.silo.client import client
from roundtable.cli.simulate import simulate
from roundtable.cli.sweep import compare, sweep
from roundtable.cli.task import task
from roundtable.cli.version import version
from roundtable.core import extras
from roundtable.core.errors import (
    AggregationError,
    ConfigError,
    LayoutError,
    PrivacyError,
    RoundtableError,
    TaskError,
)
from roundtable.core.observability.logs import ConsoleFormatter
from roundtable.proto.channel import TLS_1_3_ONLY

_MISTAKES = (ConfigError, TaskError, PrivacyError, AggregationError, LayoutError)
"""What is wrong in a file of the caller's, or in the command line; in a round these stop the job instead."""

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130


def _version(context: click.Context, option: click.Parameter, asked: bool) -> None:
    if asked and not context.resilient_parsing:
        context.invoke(version, as_json=False)
        context.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="As `version`."
)
@click.option("-v", "--verbose", is_flag=True, help="Show detailed logs on standard error.")
def cli(verbose: bool) -> None:
    """Federated learning for organisations that may not pool their data.

    Start with `roundtable demo`: a coordinator and three agents on this machine train one model.
    """
    if not verbose:
        # gRPC's own lines on stderr repeat, less clearly, what our errors say. It reads this once, on import.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    for name, value in TLS_1_3_ONLY.items():
        os.environ.setdefault(name, value)
    handler = logging.StreamHandler()
    handler.setFormatter(ConsoleFormatter())
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, handlers=[handler])


for command in (
    analyse,
    backup,
    restore,
    audit,
    ca,
    client,
    clients,
    compare,
    completion,
    demo,
    doctor,
    invite,
    job,
    migrate,
    model,
    new,
    operators,
    page,
    privacy,
    relay,
    server,
    simulate,
    sweep,
    task,
    token,
    version,
):
    cli.add_command(command)
for command in (archive, bundle, verify_model):
    audit.add_command(command)
# An operator's command under a silo's name, because it is silos that it revokes.
client.add_command(revoke)


def run(arguments: Sequence[str]) -> int:
    """Runs one command line and returns its exit code; messages of errors go to stderr."""
    try:
        result = cli.main(args=list(arguments), prog_name="roundtable", standalone_mode=False)
    except click.ClickException as error:
        show_error(error)
        return error.exit_code
    except RoundtableError as error:
        say_error(error)
        return WRONG_USAGE if isinstance(error, _MISTAKES) else FAILED
    except ModuleNotFoundError as error:
        advice = extras.missing(error, "this command")
        if advice is None:
            raise
        say_error(advice)
        return WRONG_USAGE
    except BrokenPipeError:
        # The reader of our output (`| head`) has seen enough; keep the interpreter's last flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        # A file or folder of the caller's that cannot be read or written; --verbose shows where.
        named = error.filename is not None or error.errno in (errno.ENOSPC, errno.EDQUOT)
        if not named or logging.getLogger().isEnabledFor(logging.DEBUG):
            raise
        say_error(f"{error.filename or 'the disk'}: {error.strerror}")
        return FAILED
    except (click.Abort, KeyboardInterrupt):
        say("Interrupted.", err=True)
        return INTERRUPTED
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:]))

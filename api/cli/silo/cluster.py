"""`roundtable client plan`, `profile`, `report`: how the silo's cluster would train a job, and how it did."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import json_option, set_option
from roundtable.cli.shared.output import print_json, print_table, say, say_lines, working
from roundtable.core.bounds import is_word
from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.cluster.choice.planner import ClusterPlan
    from roundtable.cluster.tools.advice import Hint


@click.command()
@click.argument("job_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--world", type=click.IntRange(1), help="Devices in all; default: as [cluster] says.")
@click.option("--memory", metavar="SIZE", help="Memory of one device, for example 80GiB.")
@click.option("--gpu", metavar="NAME", help="The devices, for example A100; default: H100 for 80 GiB.")
@click.option("--host-memory", metavar="SIZE", help="Memory of one node, for offload; default there: 2TiB.")
@click.option("--task", "reference", help="The task's code, where agent.toml does not name it.")
@json_option
@set_option
@click.pass_context
def plan(
    context: click.Context,
    job_file: Path,
    world: int | None,
    memory: str | None,
    gpu: str | None,
    host_memory: str | None,
    reference: str | None,
    as_json: bool,
    overrides: dict[str, object],
) -> None:
    """Print the strategy for a job on this silo's cluster.

    With its memory and time by term, and why it was chosen. Nothing is trained and no weight is made, so it
    runs without a GPU: try --world and --memory.
    """
    from roundtable.cluster.choice.machine_rates import in_words
    from roundtable.cluster.choice.step_time import format_seconds
    from roundtable.cluster.tools.planning import other_hardware, plan_job
    from roundtable.core.quantities import format_bytes

    other = other_hardware(gpu, host_memory)
    with working("planning") as told:
        planned = plan_job(context.obj, job_file, overrides, world, memory, reference, other, told)
    if as_json:
        print_json(planned.to_plain())
        return
    say(f"{planned.parameters:,} parameters on {planned.resources}")
    say(f"strategy      {planned.strategy}")
    say(f"a step        {planned.micro_batches} micro-batches on each rank")
    say()
    say("memory of the fullest device")
    for line in planned.estimate.lines():
        say(f"  {line}")
    say()
    _say_time(planned)
    say("links")
    unmeasured = [
        "not measured yet: the first round measures them, and published or assumed figures stand in"
    ]
    for line in planned.links.lines(time.time()) if planned.links is not None else unmeasured:
        say(f"  {line}")
    for line in in_words(planned.rates, planned.resources):
        say(f"  {line}")
    say()
    say("the best of each kind")
    rows = [
        (str(each.strategy), format_seconds(each.seconds), format_bytes(each.peak), each.why_not or "taken")
        for each in planned.considered
    ]
    print_table(("strategy", "a step", "memory", "why not"), rows, "")
    say("what each optimisation saves")
    savings = [
        (each.optimisation, "yes" if each.used else "no", format_bytes(each.saves), f"{each.costs:+.0%}")
        for each in planned.savings
    ]
    print_table(("optimisation", "used", "memory saved", "time"), savings, "nothing can be left out or added")
    say("why")
    for reason in planned.reasons:
        say(f"  {reason}")


def _say_time(planned: ClusterPlan) -> None:
    """The predicted step by term, and what it comes to."""
    from roundtable.cluster.choice.step_time import format_seconds

    time, speed = planned.time, planned.examples_per_second
    say(f"predicted seconds of a step: {format_seconds(time.seconds)}")
    for line in time.lines():
        say(f"  {line}")
    tokens = f", {speed * planned.tokens:,.0f} tokens" if planned.tokens else ""
    share = planned.utilisation
    used = f", {share:.1%} of the devices' peak" if share is not None else ""
    say(f"  {speed:,.4g} examples{tokens} a second{used}")
    if planned.strategy.mesh.pp > 1:
        say(f"  {time.bubble_share:.1%} of the passes' time is the pipeline's bubble")
    say()


@click.command("verify-cluster")
@click.option(
    "--world", type=click.IntRange(2), help="Ranks here; default: this machine's GPUs, or 2 on a CPU."
)
@json_option
def verify_cluster(world: int | None, as_json: bool) -> int:
    """Check this machine's devices, links and strategies.

    Measures the bandwidth of all-reduces, and compares every strategy with one process. For several nodes
    start `torchrun ... -m roundtable.cluster.tools.verify cuda` on each of them.
    """
    from roundtable.cluster.tools.verify import TOLERANCE, verify_here

    report = verify_here(world)
    if as_json:
        print_json(report)
    else:
        say(f"{report['world']} ranks, {report['backend']}, torch {report['torch']}")
        for row in report["all_reduce"]:
            say(f"  all-reduce {row['bytes']:>12,} B   {row['bus'] / 1e9:8.3f} GB/s")
        for row in report["checks"]:
            verdict = "equal" if row["difference"] <= TOLERANCE else "DIFFERENT"
            say(f"  {verdict:<10} {row['difference']:.1e}   {row['strategy']}")
    return int(any(row["difference"] > TOLERANCE for row in report["checks"]))


@click.command("profile")
@click.argument("job_file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps to profile.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    default="trace.json",
    show_default=True,
    help="The trace, for chrome://tracing or Perfetto.",
)
@click.option("--worlds", metavar="N,N", help="Time the steps on so many ranks each, and write no trace.")
@json_option
@set_option
@click.pass_context
def profile(
    context: click.Context,
    job_file: Path,
    steps: int,
    output: Path,
    worlds: str | None,
    as_json: bool,
    overrides: dict[str, object],
) -> None:
    """Run a few steps of a job under torch's profiler.

    They run on one device, and the trace is written. With --worlds 1,2,4 report how they speed up with the
    number of ranks on this machine.
    """
    if worlds is not None:
        _scaling(context.obj, job_file, worlds, steps, as_json, overrides)
        return
    from roundtable.cluster.tools.advice import advise
    from roundtable.cluster.tools.profiling import profile_job

    profiled = profile_job(context.obj, job_file, overrides, steps, output)
    advice = advise(profiled.report)
    if as_json:
        values = {"device": profiled.device, "trace": str(profiled.trace), **profiled.report}
        print_json({**values, "advice": [asdict(each) for each in advice]})
        return
    say_lines(profiled.table)
    say(
        f"{profiled.examples_per_second:,.0f} examples a second on {profiled.device}; trace: {profiled.trace}"
    )
    _say_advice(advice)


@click.command("report")
@click.argument("job")
@click.option("--last", type=click.IntRange(1), default=20, show_default=True, help="Rounds to show.")
@json_option
@click.pass_context
def report(context: click.Context, job: str, last: int, as_json: bool) -> None:
    """Print how fast a job ran on this silo's cluster.

    With what its figures advise. The figures are the silo's own: they are in the agent's state folder and go
    nowhere.
    """
    from roundtable.client.policy.config import load_agent_config
    from roundtable.cluster.tools.advice import advise, whole_job
    from roundtable.cluster.train.round_reports import kept_reports

    config = load_agent_config(context.obj)
    reports = kept_reports(config.state / "cluster", job) if is_word(job) else []
    if not reports:
        raise ConfigError(
            f"no round of {job!r} has been trained on this silo's cluster; `roundtable client jobs` names "
            "the jobs that it takes part in"
        )
    whole = whole_job(reports)
    advice = advise(whole)
    if as_json:
        print_json({"rounds": reports, "job": whole, "advice": [asdict(each) for each in advice]})
        return
    names = (
        "round",
        "steps",
        "seconds a step",
        "least to most",
        "collectives",
        "waiting",
        "memory",
        "examples/s",
        "of peak",
        "experts",
    )
    rows = [_row(str(each["round"]), each) for each in reports[-last:]]
    print_table(names, [*rows, _row("job", whole)], "")
    if said := reports[-1].get("compile"):
        say(said)
    _say_advice(advice)


def _row(name: str, report: dict[str, Any]) -> tuple[str, ...]:
    """One line: mean ± deviation and least to most of a step, and the means of the rest."""
    from roundtable.core.quantities import format_bytes

    seconds = report["seconds"]
    whole = max(seconds["mean"], 1e-9)

    def mean(name: str, form: str, over: float = 1.0) -> str:
        return format(report[name]["mean"] / over, form) if report.get(name) is not None else "-"

    experts = [mean(f"expert_{name}", ".1%") for name in ("least", "mean", "most")]

    return (
        name,
        str(report["steps"]),
        f"{seconds['mean']:.3f} ± {seconds['deviation']:.3f}",
        f"{seconds['least']:.3f} to {seconds['most']:.3f}",
        mean("communicating", ".0%", whole),
        mean("waiting", ".0%", whole),
        format_bytes(report["memory"]),
        mean("examples_per_second", ",.1f"),
        mean("utilisation", ".0%"),
        "-" if "-" in experts else f"{experts[0]} to {experts[2]}, mean {experts[1]}",
    )


def _say_advice(advice: list[Hint]) -> None:
    for each in advice:
        say(f"{each.about}: {each.found}")
        say(f"    {each.advice}")
    if not advice:
        say("nothing stands out: no advice")


def _scaling(
    agent: Path, job_file: Path, worlds: str, steps: int, as_json: bool, overrides: dict[str, object]
) -> None:
    from roundtable.cluster.tools.advice import advise
    from roundtable.cluster.tools.scaling import scaling

    try:
        numbers = sorted({int(word) for word in worlds.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise click.BadParameter(f"--worlds {worlds!r}: write numbers of ranks with commas, 1,2,4")
    measurements = scaling(agent, job_file, overrides, numbers, steps)
    advice = [advise(one.report) for one in measurements]
    if as_json:
        pairs = zip(measurements, advice, strict=True)
        print_json([{**asdict(one), "advice": [asdict(each) for each in said]} for one, said in pairs])
        return
    names = ("ranks", "examples/s", "efficiency", "communication", "strategy")
    rows = [
        (
            one.world,
            f"{one.examples_per_second:,.1f}",
            f"{one.efficiency:.0%}",
            f"{one.communication:.0%}",
            one.strategy,
        )
        for one in measurements
    ]
    print_table(names, rows, "")
    _say_advice(advice[-1])

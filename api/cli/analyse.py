"""`roundtable analyse`: a survey's questions, over local files or a coordinator's silos."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from roundtable.cli.shared.options import connect, connection_options, json_option, set_option
from roundtable.cli.shared.output import interruptible, print_json, print_table, say, working
from roundtable.core.errors import ConfigError

if TYPE_CHECKING:
    from roundtable.core.identity.credentials import SiloIdentity
    from roundtable.operator import OperatorClient
    from roundtable.surveys import SurveyAnswers, SurveyFile

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.argument("file", required=False, type=_FILE)
@set_option
@connection_options
@click.option("--job", help="Show the answers of this analysis of a coordinator's, in the place of a FILE.")
@click.option("--csv", "csv_file", type=_FILE, help="Write the tables of all answers into this CSV file.")
@click.option("--figure", type=_FILE, help="Draw what has a picture into this .png, .svg or .pdf file.")
@click.option("--model", type=_FILE, help="Write boosted trees as xgboost's JSON into this file.")
@click.option("--report", type=_FILE, help="Sign the answers of a coordinator's silos into this JSON file.")
@click.option("--check", "checked", type=_FILE, help="Show the answers of a signed report, if it is genuine.")
@click.option("--plan", "planned", is_flag=True, help="Say what the survey costs in epsilon, and ask nobody.")
@json_option
@click.pass_context
def analyse(
    context: click.Context,
    file: Path | None,
    overrides: dict[str, Any],
    coordinator: str | None,
    credentials: Path | None,
    job: str | None,
    csv_file: Path | None,
    figure: Path | None,
    model: Path | None,
    report: Path | None,
    checked: Path | None,
    planned: bool,
    as_json: bool,
) -> int:
    """Answer the questions of a survey.

    FILE describes the columns and the questions. Over the files that its [silos] name, on this machine; with
    --coordinator, or without [silos], the silos of a coordinator are asked.
    """
    from roundtable.surveys import load_survey, plain

    if sum(each is not None for each in (file, job, checked)) != 1:
        raise click.UsageError(
            "say what to answer: the FILE of a survey, --job with an analysis's identifier, or --check with "
            "a signed report"
        )
    if planned:
        if file is None:
            raise click.UsageError("a plan is of the FILE of a survey")
        return _planned(load_survey(file, overrides), as_json)
    if checked is not None:
        findings = _checked(checked, credentials, as_json)
    elif file is None:
        with connect(coordinator, credentials) as operator:
            findings = _of_job(operator, str(job), report)
    else:
        survey = load_survey(file, overrides)
        told = context.get_parameter_source("coordinator") is click.core.ParameterSource.COMMANDLINE
        if told or not survey.silos:
            with connect(coordinator, credentials) as operator:
                findings = _by_silos(operator, survey, as_json, report)
        else:
            if report is not None:
                raise click.UsageError("a report is of a coordinator's silos: give --coordinator")
            findings = _here(survey, file)
    # First of all: silos answer so many questions a day, and a file may be refused.
    if as_json:
        print_json(plain(findings.to_dict()))
    else:
        show(findings)
    if csv_file is not None:
        findings.to_csv(csv_file)
    if figure is not None:
        findings.plot(figure)
    if model is not None:
        findings.save_model(model)
    return 0 if all(not answer.why for answer in findings.answers) else 1


def _planned(survey: SurveyFile, as_json: bool) -> int:
    from roundtable.surveys import survey_plan

    plan = survey_plan(survey)
    if as_json:
        print_json(plan.to_dict())
        return 0
    say(
        f"This survey costs epsilon = {plan.epsilon:.4g} at delta = {plan.delta:g} of each silo's account: "
        "it hides whether any one row is there, whatever the row holds."
    )
    rows = [
        [
            each.title,
            each.ask,
            f"{each.epsilon:.4g}",
            ", ".join(f"{k} {v:.4g}" for k, v in each.noise.items()),
        ]
        for each in plan.questions
    ]
    say()
    print_table(["question", "ask", "epsilon alone", "noise of a silo (sd)"], rows, "nothing")
    say(
        f"  all questions share one mechanism with noise multiplier {plan.noise_multiplier:.4g}, in "
        f"{'1 round' if plan.rounds == 1 else f'{plan.rounds} rounds'}; noise is on counts, and on sums of "
        "columns scaled to [-1, 1]; over n silos it is √n times as large"
    )
    say(f"  trust: {plan.trust}")
    return 0


def _here(survey: SurveyFile, file: Path) -> SurveyAnswers:
    from roundtable.surveys import analyse as run

    with (
        interruptible("Nothing is kept: the survey begins anew."),
        working(f"answering {file}") as say_how_far,
    ):
        return run(survey, progress=lambda seen: say_how_far(f"round {seen.round} of at most {seen.rounds}"))


def _checked(path: Path, credentials: Path | None, quiet: bool) -> SurveyAnswers:
    from roundtable.core.identity.certificates import read
    from roundtable.core.identity.credentials import CA_CERTIFICATE
    from roundtable.survey_report import read_report

    if credentials is None:
        raise click.UsageError("say whom you trust: --credentials with a folder that has ca.crt")
    signed, told = read_report(path, read(credentials / CA_CERTIFICATE))
    when = datetime.fromtimestamp(signed.time, UTC)
    say(f"Signed by {signed.signer} on {when:%Y-%m-%d %H:%M} UTC, of analysis {told.job}.", err=quiet)
    return told.findings


def _signer(operator: OperatorClient) -> SiloIdentity:
    from roundtable.operator_credentials import signing_identity

    identity = signing_identity(operator.folder)
    if identity is None:
        raise ConfigError(
            "a report is signed with a certificate's key, and these credentials have none: use a folder made "
            "by `roundtable ca issue`"
        )
    return identity


def _by_silos(
    operator: OperatorClient, survey: SurveyFile, quiet: bool, report: Path | None
) -> SurveyAnswers:
    from roundtable.asked_silos import begin, offering
    from roundtable.cli.jobs.watch import Silent, follow, make_display
    from roundtable.surveys import survey_job

    if report is not None:
        _signer(operator)
    names = offering(operator, survey.task.name) if survey.goes_by_silos or not survey.cohort else []
    silos = survey.cohort or len(names)
    analysis = survey_job(survey.model_copy(update={"silos": {}}), silos, names)
    with interruptible("Nothing was started; the same command begins anew."):
        submitted = begin(operator, analysis, folder=survey.folder)
    say(f"Submitted analysis {submitted.id} ({submitted.name}) to {silos} silos.", err=quiet)
    hint = f"The analysis goes on; see its answers by `roundtable analyse --job {submitted.id}`."
    with interruptible(hint):
        follow(operator.watch(submitted.id, 1), Silent() if quiet else make_display(False))
    return _of_job(operator, submitted.id, report, survey.folder)


def _of_job(
    operator: OperatorClient, job: str, report: Path | None, folder: Path | None = None
) -> SurveyAnswers:
    from roundtable.asked_silos import outcome
    from roundtable.core.config import job_from_json
    from roundtable.survey_report import write_report
    from roundtable.surveys import findings_of

    detail, vector = outcome(operator, job)
    findings = findings_of(job_from_json(detail.job_config), vector, detail.job.rounds_done, folder)
    if report is not None:
        write_report(report, findings, _signer(operator), detail.job.id, detail.job_config)
    return findings


def show(findings: SurveyAnswers) -> None:
    """The answers as tables, one below the other."""
    masked = "their sums were masked" if findings.masked else "each one's sums were seen"
    if (privacy := findings.privacy) is not None:
        cost = f"epsilon = {privacy['epsilon']:.4g} at delta = {privacy['delta']:g}"
        masked = f"each hid its rows by noise ({cost}, a row is there or not)" + (
            ", and their noisy sums were masked" if findings.masked else ""
        )
    many = "1 round" if findings.rounds == 1 else f"{findings.rounds} rounds"
    say(f"{findings.name}: {findings.silos} silos, {many}; {masked}.")
    if privacy is not None and not privacy["guarantee"]:
        say("A rehearsal without guarantee: its noise follows from the job's seed. Publish none of it.")
    for answer in findings.answers:
        say()
        say(answer.title)
        if answer.why:
            say(f"  not answered: {answer.why}")
            continue
        rows = [[_shown(value) for value in row] for row in answer.rows]
        print_table([str(name) for name in answer.header], rows, "nothing")
        if answer.hidden:
            few = f"fewer than {findings.least_count} rows"
            say(f"  {answer.hidden} cells are hidden: they hold {few}, or would tell of one that does")
        for note in answer.notes:
            say(f"  {note}")


def _shown(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)

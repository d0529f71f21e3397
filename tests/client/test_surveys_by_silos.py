"""Questions that go by silos, asked of real ones: each is known by its name, answers are as of files here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from federation import NAMES, agents, federation_of

from roundtable.cli.main import run as run_command
from roundtable.core.errors import ConfigError
from roundtable.surveys import analyse, load_survey, survey_job
from tests.client.test_analyses import SURVEY, wait_for_silos, with_table, write

ASKED = """
[[questions]]
ask = "describe"
columns = ["age"]
pooling = "median_of_means"
"""
BY_SILOS = SURVEY[: SURVEY.index("[[questions]]")].replace("= true", "= false\nleast_count = 1") + ASKED


@pytest.mark.slow
async def test_real_silos_are_divided_as_local_files_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    survey = write(tmp_path, BY_SILOS)
    here = analyse(survey)
    assert here[0]["age"]["all"]["groups"] == 3
    async with federation_of(tmp_path, "") as (address, folder):
        command = ["analyse", str(survey), "--json", "--coordinator", address]
        command += ["--credentials", str(folder / "operator")]
        async with agents(*(with_table((address, folder), name, least_count=1) for name in NAMES)):
            await asyncio.to_thread(wait_for_silos, address, folder)
            code = await asyncio.to_thread(run_command, command)
    said = capsys.readouterr()
    assert code == 0, said.err
    assert json.loads(said.out) == here.to_dict()


def test_a_cohort_of_silos_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    survey = load_survey(write(tmp_path, BY_SILOS)).model_copy(update={"silos": {}})
    assert list(survey_job(survey, 3, NAMES).algorithm.named_clients()) == list(NAMES)
    with pytest.raises(ConfigError, match="cohort = 3 leaves out some of 4 silos"):
        survey_job(survey, 3, (*NAMES, "doum"))

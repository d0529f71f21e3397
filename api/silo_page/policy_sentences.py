"""The silo's rules as sentences that nobody needs the manual for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from roundtable.client.policy.config import AgentConfig
from roundtable.client.policy.guarantees import guarantees
from roundtable.client.policy.policy_table import PolicyTable


def _of_analyses(given: Mapping[str, Any]) -> str:
    """`[policy.analyses]`, of which only what is set."""
    said = []
    if "least_count" in given:
        said.append(f"tell of no fewer than {given['least_count']} rows")
    if "round_to" in given:
        said.append(f"tell counts alone, as multiples of {given['round_to']}")
    if given.get("allowed") is not None:
        said.append(f"ask questions of the kind {', '.join(given['allowed']) or 'none'} alone")
    if given.get("own_figures"):
        said.append("may show figures of this silo's own rows, if they say so")
    if given.get("tables") is not None:
        said.append(f"ask the tables {', '.join(given['tables']) or 'none'} alone")
    if given.get("protected"):
        said.append(f"use {', '.join(given['protected'])} neither as an outcome nor as a group")
    if "silos_apart" in given:
        said.append(f"ask of a column among silos that differ by none or at least {given['silos_apart']}")
    if given.get("epsilon") is not None:
        said.append(
            "are answered under differential privacy alone, with noise of this silo's own, at ε of at most "
            f"{given['epsilon']:g} each"
        )
    if given.get("a_day") is not None:
        said.append(f"begin at most {given['a_day']} times within 24 hours")
    return f"Analyses {'; they '.join(said)}."


_SET: Mapping[str, Callable[[Any], str]] = {
    "secure_aggregation": lambda on: (
        "Updates leave masked: nobody sees this silo's own, only sums over a cohort."
    ),
    "epsilon": lambda most: (
        f"All jobs together may spend ε = {most:g} of this silo's own account, and no more."
    ),
    "delta": lambda most: f"A job's δ is at most {most:g}.",
    "minimum_cohort": lambda least: f"A job's cohort has at least {least} silos.",
    "identities": lambda which: f"In secure aggregation peers count whom the {which} authority certified.",
    "stated_epsilon": lambda most: (
        f"Jobs with the coordinator's noise may promise ε = {most:g} together; each must promise something."
    ),
    "client_level_epsilon": lambda most: (
        f"A job hides the whole silo at ε = {most:g} or less, by noise of silos."
    ),
    "example_level_epsilon": lambda most: (
        f"A job hides each record at ε = {most:g} or less, by this silo's noise."
    ),
    "approval": lambda on: "A person here approves each new job before anything of it runs.",
    "submitters": lambda names: f"Only these may submit jobs: {', '.join(names) or 'nobody'}.",
    "public_evaluation": lambda on: "The test data here are public: figures on them may leave for any job.",
    "rounds": lambda most: f"Of a job at most {most} updates and {most} evaluations leave.",
    "epochs": lambda most: f"A round passes over the data at most {most} times.",
    "steps": lambda most: f"A round takes at most {most} optimizer steps.",
    "batch_size": lambda most: f"A batch has at most {most} records.",
    "seconds": lambda most: f"A step of a round may take {most:g} seconds.",
    "max_memory": lambda most: f"Training may hold {most} of main memory.",
    "max_gpus": lambda most: f"Training sees at most {most} GPUs." if most else "Training sees no GPU.",
    "max_gpu_memory": lambda most: f"Training may hold {most} of each GPU's memory.",
    "bases": lambda folders: (
        f"A job's pretrained base is read below {', '.join(folders) or 'no folder'} or in the cache of "
        "Hugging Face, and nowhere else; nothing is downloaded."
    ),
    "generations": lambda count: (
        f"After an evaluation a language model writes {count} texts on, into this silo's state folder alone."
    ),
    "relay_sums": lambda _: (
        "A job whose relays add updates up is refused: this silo's updates go on by themselves."
    ),
    "regional_models": lambda relays: (
        f"Between two rounds that go up, models of the relays {', '.join(relays)} are trained from."
        if relays
        else "Jobs whose regions have rounds of their own are refused."
    ),
    "hours": lambda span: f"Work begins only at {span}, by this machine's clock.",
    "metrics": lambda which: (
        "Losses and figures leave." if which == "all" else "No loss and no figure leaves."
    ),
    "analyses": _of_analyses,
    "metrics_digits": lambda digits: f"Figures are rounded to {digits} decimals before they leave.",
}
_UNSET: Mapping[str, str] = {
    "secure_aggregation": "Jobs without secure aggregation are let through: the coordinator then sees this "
    "silo's own updates.",
    "approval": "No person is asked: what the rules allow begins at once.",
    "submitters": "Anybody whom the coordinator lets may submit jobs.",
    "bases": "A job that may name its pretrained base may name any folder that the agent's account reads.",
    "relay_sums": "A job may have the relay on this silo's way add its update to others before it goes on.",
    "metrics": "Losses and figures of training and evaluation leave, as far as a job lets them.",
    "rounds": "A job may have any number of rounds.",
}
"""What is said of rules that are not there, where that matters to whoever answers for the data."""


def sentences(config: AgentConfig) -> list[dict[str, str]]:
    """Each rule with its key, its sentence, what it guarantees against whom, and what it lacks for that."""
    policy = config.policy
    given = policy.model_dump(exclude_unset=True, exclude_defaults=True)
    told = {each.key: each for each in guarantees(policy)}
    found = []
    for key in PolicyTable.model_fields:
        value = given.get(key)
        if value is not None and value is not False and value != {}:
            sentence, known = _SET[key](value), told.get(key)
            found.append(
                {
                    "key": key,
                    "sentence": sentence,
                    "guarantee": known.sentence if known else "",
                    "gap": known.gap if known else "",
                }
            )
        elif key in _UNSET:
            found.append({"key": key, "sentence": _UNSET[key], "guarantee": "", "gap": ""})
    return [*found, *_others(config)]


def _others(config: AgentConfig) -> list[dict[str, str]]:
    tasks = ", ".join(sorted(config.tasks))
    lines = {
        "tasks": f"Only these tasks run here: {tasks}.",
        "log_sharing": (
            f"Lines of the log that operators may read: {', '.join(config.log_sharing.kinds)}."
            if config.log_sharing.kinds
            else "No line of the agent's log leaves."
        ),
        "diagnostics": {
            "never": "No report of this silo leaves.",
            "ask": "A report leaves only if a person here approves it, exactly as shown.",
            "always": "Reports leave whenever operators ask for one.",
        }[config.diagnostics.reports],
    }
    return [{"key": key, "sentence": sentence, "guarantee": "", "gap": ""} for key, sentence in lines.items()]

"""The second door: a training script of your own joins rounds.

import roundtable as rt

for round in rt.join("agent.toml", task="digits"):
    model.load_state_dict(round.weights)
    ...                                  # train as you like
    round.submit(model, examples=len(data))
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from roundtable.client.agent.agent import Agent
from roundtable.client.policy.config import AgentConfig, load_agent_config
from roundtable.client.worker.script_trainer import Evaluator, Round, ScriptTrainer
from roundtable.core.paths import AnyPath

CONFIG_VARIABLE = "ROUNDTABLE_AGENT"
_JOIN_SECONDS = 60.0


def join(
    config: AgentConfig | AnyPath | None = None,
    *,
    task: str | None = None,
    evaluate: Evaluator | None = None,
) -> Iterator[Round]:
    """Takes part as a silo, and gives each round to the caller until the job is over.

    `config` is an agent.toml (default: the file that the environment variable ROUNDTABLE_AGENT names, or
    ./agent.toml). `task` is the name under which jobs know this script; default: the names in the
    file's `[tasks]`. `evaluate`, if given, is called in a thread of its own with a Round, whose
    weights it measures: it returns {name: (sum, count)} on the silo's test data.

    A job that ends while the line is cut ends the loop once the line is back. A script that goes on to the
    next round without submitting refuses the one it had. Leaving the
    loop leaves the federation, once what was submitted is delivered; where an error leaves the loop
    and its traceback is kept, as in a notebook, `close()` on the iterator does it. Raises what a
    person has to mend: ConfigError, IdentityError, ResourceError, and Refused where the coordinator
    does not want this silo.
    """
    settings = join_settings(config)
    if task is not None:
        settings = replace(settings, tasks={task: "script"})
    policy = settings.policy
    trainer = ScriptTrainer(settings.state / "jobs", evaluate, policy.epsilon, policy.delta)
    with _Background(settings, trainer):
        while (current := trainer.rounds.get()) is not None:
            if current.wanted:
                try:
                    yield current
                finally:
                    current._skip()


class _Background:
    """The agent in a thread of its own; its error is raised where the script waits."""

    def __init__(self, config: AgentConfig, trainer: ScriptTrainer) -> None:
        self._agent = Agent(config, trainer)
        self._trainer = trainer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="roundtable-agent", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._loop is not None and not self._loop.is_closed():
            interrupted = kind is KeyboardInterrupt
            self._loop.call_soon_threadsafe(lambda: self._agent.stop(deliver=not interrupted))
        self._thread.join(_JOIN_SECONDS)
        if self._error is not None and kind is None:
            raise self._error

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # noqa: BLE001 - handed to the script's thread, which raises it
            self._error = error
        finally:
            self._trainer.rounds.put(None)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._agent.run()


def join_settings(config: AgentConfig | AnyPath | None) -> AgentConfig:
    """The agent.toml that `join` reads."""
    if isinstance(config, AgentConfig):
        return config
    return load_agent_config(Path(config or os.environ.get(CONFIG_VARIABLE, "agent.toml")))

"""What each agent was asked to do last for one job, and how far it says it is; kept in memory only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from roundtable.core.observability.training_setup import TrainingSetup
from roundtable.core.observability.transfer_figures import ModelArrival
from roundtable.engine import messages as m
from roundtable.server.door import to_agents
from roundtable.server.door.agent_messages import AgentMessage, Begun, StepProgress
from roundtable.server.door.to_agents import SignedSubmission
from roundtable.server.jobs.job_services import JobServices
from roundtable.server.jobs.sessions import AgentSession
from roundtable.server.jobs.step_means import StepMeans
from roundtable.server.store.job_silo_rows import SetupRow

log = logging.getLogger("roundtable.server.jobs.step_instructions")


class StepInstructions:
    """The instructions in force. `submission` goes with each: silos check who has asked for the job.

    `choices` are the ranks of factors that a silo may choose between by its memory.
    """

    def __init__(
        self,
        job: str,
        config: str,
        layout: str,
        submission: SignedSubmission,
        services: JobServices,
        choices: Callable[[str], Sequence[int]],
    ) -> None:
        self._job = job
        self._choices = choices
        self._config = config
        self._layout = layout
        self._submission = submission
        self._services = services
        self._in_force: dict[str, m.Instruct] = {}
        self._progress: dict[str, StepProgress] = {}
        self.means = StepMeans()
        self._sent: dict[str, ModelArrival] = {}
        self._asked: dict[str, float] = {}

    def send(self, action: m.Instruct, certificates: Sequence[bytes]) -> None:
        """Sends an instruction, with the certificates of those who take part in secure aggregation."""
        if self._in_force.get(action.client) != action:
            self._progress.pop(action.client, None)
        self._in_force[action.client] = action
        sizes = self._services.artifacts.size
        size = sizes(action.model)
        if size is None:
            log.error("model %s is missing from the artifacts", action.model, extra={"job": self._job})
            return
        message = to_agents.instruction(
            self._job,
            self._config,
            self._layout,
            action,
            size,
            self._services.clock(),
            certificates,
            self._submission,
            [to_agents.SizedHop(hop, kept) for hop in action.hops if (kept := sizes(hop.delta)) is not None],
        )
        self._asked.pop(action.client, None)
        if self._services.sessions.send(action.client, message):
            self._asked[action.client] = time.monotonic()

    def heard(self, session: AgentSession, message: AgentMessage, *, told: bool) -> None:
        """Keeps what the silo trains on, and takes the first word that an instruction has come as a round
        trip, where cohorts are `told`. Of a silo behind a relay nothing is known by that.

        Who keeps a finished update has done what it was asked: it may leave, and come back.
        """
        client = session.name
        if not isinstance(message, Begun) or self.step_of(client) != message.at.step:
            return
        if message.setup is not None and told and self._may_be(client, message.setup):
            now, round = self._services.clock(), message.at.step.round
            self._services.setups.heard(SetupRow(self._job, client, now, round, message.setup))
        asked = self._asked.pop(client, None)
        if asked is not None and told and "relay" not in session.client.metadata:
            self._services.links.answered(client, time.monotonic() - asked)
        if message.prepared:
            self._in_force.pop(client, None)
            self._progress.pop(client, None)

    def _may_be(self, client: str, setup: TrainingSetup) -> bool:
        choices = self._choices(client)
        if setup.factor_rank in (0, *choices):
            return True
        log.warning(
            "%s says that it trains factors of rank %d, and the job leaves it %s: that is not kept",
            client,
            setup.factor_rank,
            f"one of {sorted(choices)}" if choices else "no choice",
            extra={"job": self._job, "site": client},
        )
        return False

    def withdraw(self, action: m.Withdraw) -> None:
        """Tells the agent that its instruction no longer holds."""
        self._in_force.pop(action.client, None)
        self._progress.pop(action.client, None)
        self._services.sessions.send(action.client, to_agents.withdrawal(self._job, action))

    def may_read(self, client: str, digest: str) -> bool:
        """Whether the instruction in force for this agent names the artifact."""
        instruction = self._in_force.get(client)
        if instruction is None:
            return False
        return digest == instruction.model or any(hop.delta == digest for hop in instruction.hops)

    def sent(self, client: str, sent: ModelArrival) -> None:
        """Counts what the agent was sent of models, until its next update."""
        before = self._sent.get(client, ModelArrival())
        self._sent[client] = ModelArrival(before.size + sent.size, before.seconds + sent.seconds)

    def take_sent(self, client: str) -> ModelArrival:
        """What the agent was sent since this was asked last; a restart forgets that."""
        return self._sent.pop(client, ModelArrival())

    def step_of(self, client: str) -> m.Step | None:
        """The step of the instruction in force for this agent."""
        instruction = self._in_force.get(client)
        return instruction.step if instruction else None

    def model_of(self, client: str, step: m.Step) -> str:
        """The model that the agent was asked to work with in this step; "" where that is not in force."""
        instruction = self._in_force.get(client)
        return instruction.model if instruction is not None and instruction.step == step else ""

    def report(self, client: str, step: m.Step, progress: StepProgress) -> None:
        """Notes what an agent says of the step that it was asked for; of other steps nothing."""
        if self.step_of(client) == step:
            self._progress[client] = progress
            self.means.add(client, step, progress)

    def progress_of(self, client: str) -> StepProgress | None:
        """How far the agent says it is with its step."""
        return self._progress.get(client)

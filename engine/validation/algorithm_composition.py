"""What a job's algorithm does not go together with, by its declarations: refused before round 1."""

from __future__ import annotations

from roundtable.core.algorithms.contract import AlgorithmPlace, ClientAlgorithm
from roundtable.core.config import JobConfig
from roundtable.core.errors import ConfigError, PrivacyError
from roundtable.core.privacy_table import LARGEST_RING, ClientLevel, ExampleLevel, NoPrivacy, masking_of


def check_algorithm(job: JobConfig, algorithm: ClientAlgorithm) -> None:
    """Raises ConfigError or PrivacyError, naming the algorithm, the key and the reason."""
    said, composition = f"algorithm {job.algorithm.name!r}", algorithm.composition
    why = f": {composition.reason}" if composition.reason else ""
    if job.privacy.level not in composition.levels:
        raise PrivacyError(
            f"privacy.level = {job.privacy.level!r}: {said} is not shown to keep its guarantee{why}; "
            f"it goes with {', '.join(sorted(composition.levels))}"
        )
    _check_own_gradients(job, algorithm, said)
    weightings = composition.weightings
    if weightings is not None and job.aggregation.weighting not in weightings:
        raise ConfigError(
            f"aggregation.weighting = {job.aggregation.weighting!r} and {said}{why}; "
            f"set weighting = {' or '.join(map(repr, sorted(weightings)))}"
        )
    if job.round.mode == "buffered" and not composition.buffered:
        raise ConfigError(
            f'round.mode = "buffered" and {said}: it keeps what the silos of a round agree upon, and in '
            "buffered rounds they train from different models; use fedavg or fedprox"
        )
    if job.algorithm.momentum and not composition.momentum:
        raise ConfigError(f"algorithm.momentum and {said}{why}; set momentum = 0")
    if job.algorithm.weight_decay and not composition.weight_decay:
        raise ConfigError(f"algorithm.weight_decay and {said}{why}; set weight_decay = 0")
    if job.algorithm.max_gradient_norm is not None and not composition.gradient_clipping:
        raise ConfigError(f"algorithm.max_gradient_norm and {said}{why}; leave it out")
    if job.algorithm.scheduled and not composition.schedule:
        raise ConfigError(
            f"algorithm.schedule, schedule_warm_up and {said}: what it computes counts on one learning rate "
            "for a round; leave them out"
        )
    _check_whole_schedule(job)
    if job.algorithm.work == "by_speed" and not composition.unequal_steps:
        raise ConfigError(
            f'algorithm.work = "by_speed" and {said}: the model would lean towards the silos that take many '
            'steps; set work = "equal", or name = "fednova", "scaffold" or "feddyn", which take that out'
        )
    _check_round(job, algorithm, f"{said}{why}")
    _check_merging(job, algorithm, said)
    if not composition.adaptive_clipping:
        _check_known_bound(job, said)
    if algorithm.places and algorithm.server() is None:
        raise ConfigError(f"{said} declares places and no server() that says what becomes of them")
    for place in (place for place in algorithm.places if place.sent):
        _check_place(job, f"{said} sends {place.name!r} beside its update, and", place)


def _check_whole_schedule(job: JobConfig) -> None:
    """A schedule over all rounds must end behind its warm-up."""
    table = job.algorithm
    if table.schedule_over == "job" and table.steps and table.schedule_warm_up >= table.steps * job.rounds:
        raise ConfigError(
            f"{table.schedule_warm_up} steps of warm-up: the job has {job.rounds} rounds of {table.steps} "
            "steps, and the learning rate would never have its full value; set fewer",
            key=("algorithm", "schedule_warm_up"),
        )


def _check_round(job: JobConfig, algorithm: ClientAlgorithm, said: str) -> None:
    """What happens around the training of a round."""
    if job.algorithm.exact:
        check_exact(job, said)
    composition, cohort = algorithm.composition, job.cohort
    if masking_of(job.privacy) is not None and not composition.masked:
        raise PrivacyError(f"privacy.secure_aggregation and {said}: leave it out")
    server = job.aggregation.server_optimizer
    plain = server.name == "fedavg" and server.learning_rate in (None, 1.0)
    if not composition.server_optimizer and not plain:
        raise ConfigError(
            f"aggregation.server_optimizer and {said}: leave it out, and the model is moved by "
            "the algorithm alone"
        )
    if composition.outer_step:
        _check_outer_step(job, said)
    if composition.one_by_one and (cohort.size != 1 or cohort.strategy != "round_robin"):
        raise ConfigError(
            f'{said}: set cohort.size = 1 and cohort.strategy = "round_robin"; a round is one hop'
        )
    if composition.rules == "mean" and (job.aggregation.rule != "mean" or job.aggregation.pre):
        raise ConfigError(
            f'aggregation.rule = {job.aggregation.rule!r} and {said}: set rule = "mean" without pre'
        )
    private = not isinstance(job.privacy, NoPrivacy)
    if private and job.evaluation.every and algorithm.keeps_own():
        raise PrivacyError(
            f"evaluation.every and {said}: its metrics would be of what stays at a silo, which no noise "
            "protects; set evaluation.every = 0"
        )


def _check_outer_step(job: JobConfig, said: str) -> None:
    """Clients know the server's step, and how many of them are in it, from the job alone."""
    server, cohort = job.aggregation.server_optimizer, job.cohort
    wanted = [
        (server.name in ("fedavg", "diloco"), ("aggregation", "server_optimizer"), '"diloco" or "fedavg"'),
        (cohort.size is not None, ("cohort", "size"), "the number of silos whose updates a round adds up"),
        (cohort.over_selection == 1.0, ("cohort", "over_selection"), "1"),
        (not job.regions.sum, ("regions", "sum"), "false"),
        (job.regions.rounds == 1, ("regions", "rounds"), "1"),
    ]
    for fine, key, value in wanted:
        if not fine:
            raise ConfigError(f"{'.'.join(key)} and {said}; set {value}", key=key)


def _check_merging(job: JobConfig, algorithm: ClientAlgorithm, said: str) -> None:
    """Factors that are merged one client by one must come as they are, and go down so."""
    server = algorithm.server()
    if server is None or not server.merges():
        return
    if job.regions.sum:
        raise ConfigError(
            f"regions.sum and {said}: a relay's sum tells no single client's factors; leave regions.sum out",
            key=("regions", "sum"),
        )
    if (bound := job.aggregation.validation.max_norm) is not None:
        raise ConfigError(
            f"aggregation.validation.max_norm = {bound:g} and {said}: an update is the difference between "
            "factors of a client's own rank, fresh or cut, and those that it was sent, so that its norm "
            "follows from ranks and not from what was learnt; leave max_norm out (norm_ratio goes)",
            key=("aggregation", "validation", "max_norm"),
        )
    for key, value in (("up", job.transfer.up), ("down", job.transfer.down)):
        if value != "float32":
            raise ConfigError(
                f"transfer.{key} = {value!r} and {said}: the factors of a round are others than those of the "
                "last one, as an SVD or a fresh start gives them, so what is rounded is no small change; "
                f'set transfer.{key} = "float32"',
                key=("transfer", key),
            )


def check_exact(job: JobConfig, said: str) -> None:
    """Raises ConfigError where digits would be rounded, clipped, left out, or added up over other clients,
    PrivacyError where they may only be seen as a sum."""
    cohort, table, transfer = job.cohort, job.aggregation.validation, job.transfer
    masking, most = masking_of(job.privacy), job.algorithm.most_added()
    if (job.algorithm.sums_noise() is None) != isinstance(job.privacy, NoPrivacy):
        raise PrivacyError(
            f"{said} and privacy.level = {job.privacy.level!r}: level example and algorithm.noise_multiplier "
            "go together, and neither without the other; `roundtable analyse` sets both"
        )
    if masking is None and (why := job.algorithm.why_masked()):
        raise PrivacyError(why)
    if masking is not None and (why := job.algorithm.why_in_the_clear()):
        raise PrivacyError(why)
    named = job.algorithm.named_clients()
    fixed = cohort.size is not None and cohort.minimum == cohort.size
    plain = transfer.up == "float32" and transfer.down == "float32"
    wanted = [
        (fixed, "cohort.size and cohort.minimum", "the same number"),
        (cohort.strategy == "uniform" and cohort.over_selection == 1.0, "cohort.strategy", '"uniform"'),
        (not named or cohort.size == len(named), "cohort.size", f"{len(named)}, as algorithm.silos has"),
        (cohort.on_failure == "pause", "cohort.on_failure", '"pause"'),
        (not most or (cohort.size or 0) <= most, "cohort.size", f"at most {most}"),
        (masking is not None or table.policy == "fail", "aggregation.validation.policy", '"fail"'),
        (masking is not None or table.norm_ratio == "off", "aggregation.validation.norm_ratio", '"off"'),
        (table.max_norm is None, "aggregation.validation.max_norm", "nothing"),
        (masking is None or masking.ring_bits == LARGEST_RING, "privacy.ring_bits", str(LARGEST_RING)),
        (plain, "transfer.up and transfer.down", '"float32"'),
        (job.evaluation.every == 0, "evaluation.every", "0"),
        (not job.simulation.attack, "simulation.attack", "nothing"),
        # A mean of means is rounded twice, a sum in the ring never. Noise is charged to each silo as its sums
        # arrive, and within a relay's sum none arrive alone.
        (not job.regions.sum or (masking is not None and not job.releases_sums), "regions.sum", "false"),
        (not job.keep.best, "keep.best", "false"),
    ]
    for fine, key, value in wanted:
        if not fine:
            raise ConfigError(
                f"{said}: exact sums over the same clients in every round allow nothing else than {key} = "
                f"{value}; `roundtable analyse` sets all of it"
            )


def _check_known_bound(job: JobConfig, said: str) -> None:
    """A client has to know what of its update will count, as what it keeps follows from that."""
    known = f"{said}: what a client keeps or tells follows from its update as it counts, "
    if isinstance(job.privacy, ClientLevel) and job.privacy.clipping != "flat":
        raise PrivacyError(
            f"privacy.clipping = {job.privacy.clipping!r} and {known}and it cannot know that before; set "
            'clipping = "flat"'
        )
    if job.aggregation.validation.policy == "clip":
        raise ConfigError(
            f'aggregation.validation.policy = "clip" and {known}and it cannot know that before; set policy = '
            '"exclude"'
        )
    if job.transfer.unpacked not in ("float32", "bfloat16", "float16"):
        raise ConfigError(
            f"transfer.up = {job.transfer.up!r} and {known}and that encoding changes it too much; "
            'set transfer.up = "float32", "bfloat16" or "float16"'
        )
    if isinstance(job.privacy, ExampleLevel) and job.privacy.local_steps is not None:
        raise PrivacyError(
            f"privacy.local_steps and {said}: its steps are those of [algorithm]; set algorithm.steps in its "
            "place"
        )


def _check_own_gradients(job: JobConfig, algorithm: ClientAlgorithm, said: str) -> None:
    if isinstance(job.privacy, ExampleLevel) and (passed_over := _passed_over(algorithm)):
        raise PrivacyError(
            f'privacy.level = "example" and {said}: steps of DP-SGD make their gradients by themselves, and '
            f'its {passed_over}() would not be asked; declare levels without "example"'
        )


def _passed_over(algorithm: ClientAlgorithm) -> str:
    """What the algorithm does to steps that those of DP-SGD would not look at; "" for nothing."""
    second = type(algorithm).second is not ClientAlgorithm.second
    return algorithm.hooked() or ("resting" if algorithm.rests() else "second" if second else "")


def _check_place(job: JobConfig, said: str, place: AlgorithmPlace) -> None:
    """Everything that this job would do to an update, it would do to this vector too."""
    private, masked = not isinstance(job.privacy, NoPrivacy), masking_of(job.privacy) is not None
    or_set = f", or {place.remedy}" if place.remedy else ""
    unlike = job.aggregation.validation.max_norm is not None and place.noise is None
    if (private or masked or unlike) and place.clipping is None:
        raise PrivacyError(
            f"{said} it declares no rule for clipping it: leave out privacy and max_norm{or_set}"
        )
    if private and place.noise is None:
        raise PrivacyError(f"{said} it declares no rule for the noise on it: leave out privacy.level")
    if masked and place.masks is None:
        raise PrivacyError(f"{said} it declares no rule for masks: leave out privacy.secure_aggregation")
    if job.transfer.unpacked != "float32" and place.compression is None:
        raise ConfigError(f'{said} it declares no rule for rounding it: set transfer.up = "float32"')
    plain = job.aggregation.rule == "mean" and not job.aggregation.pre
    if place.rules == "mean" and not plain:
        raise ConfigError(
            f"{said} that is meant to be averaged: aggregation.rule = {job.aggregation.rule!r} with "
            f'{len(job.aggregation.pre)} pre-aggregations would not do so; set rule = "mean" without pre'
        )

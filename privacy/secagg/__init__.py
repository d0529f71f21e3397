"""Secure aggregation: the coordinator learns the sum of the silos' vectors, and no vector.

Bonawitz et al. 2017 (double masking, t-of-n shares) on the full graph for cohorts up to 50, Bell et
al. 2020 (random k-regular graph) above; both hardened against a coordinator that lies. Pure state
machines, bytes in and bytes out; docs/secure-aggregation.md has the threat model and the message flow.

How a coordinator drives an attempt (deadlines, transport and storage are its own business):

    plan = choose_parameters(cohort_size, dropout, corruption, clip_norm=..., weight_bound=...)
    server = SecAggServer(Session(job, round, attempt, length), plan, directory)
    # ask every silo to advertise, then for each phase, until server.phase is DONE:
    server.receive(message)             # each answer; ProtocolError: refuse it, the silo may try again
    server.fold(header, mapped_file)    # in phase MASKED instead: the upload, complete, and its header
    messages = server.advance()         # at the deadline or when server.ready; send each to its silo
    server.total, server.survivors      # the sum; ProtocolError from advance() ends the attempt

With a `group_size` in the plan, `GroupedServer` is driven alike and ends with one sum for each group.

How an agent drives it (`plan` computed from the job as well, `directory` pinned by the site):

    client = SecAggClient(session, plan, name, signer, directory, releases, minimum_cohort)
    send(client.advertise())
    answer = client.handle(message)     # PEERS, BEACON, INBOX, ALIVE, EVIDENCE; send what it returns
    # after INBOX: write client.masked_chunks(source) to a file, seal client.snapshot() beside it, sync,
    # then upload the file with client.masked(); store the snapshot again before each later answer
    # on ProtocolError: send client.abort(str(error)); a new attempt takes a new client

After a restart a silo with a snapshot goes on with `SecAggClient.restore` and the stored file; one
without has lost its keys and waits for the next attempt. A coordinator either replays the messages
it stored into a new `SecAggServer` or starts a new attempt. No mask is ever used twice.
"""

from roundtable.privacy.secagg.client import ClientPhase, SecAggClient
from roundtable.privacy.secagg.graph import combine_beacon, commit
from roundtable.privacy.secagg.grouped import GroupedServer, Least
from roundtable.privacy.secagg.groups import largest_group, make_groups, overrun
from roundtable.privacy.secagg.in_process import (
    GroupSums,
    SecureSum,
    plain_groups,
    plain_sum,
    run_groups_in_memory,
    run_in_memory,
)
from roundtable.privacy.secagg.keys import Ed25519Signer, Session, Signer
from roundtable.privacy.secagg.masks import ArraySource, VectorSource
from roundtable.privacy.secagg.parameters import MINIMUM_COHORT, SecAggParameters, choose_parameters
from roundtable.privacy.secagg.quantise import QuantisedUpdate, Quantiser
from roundtable.privacy.secagg.releases import MemoryReleases, Releases
from roundtable.privacy.secagg.server import SecAggServer, ServerPhase
from roundtable.privacy.secagg.sum_tail import Metric, Tally

__all__ = [
    "MINIMUM_COHORT",
    "ArraySource",
    "ClientPhase",
    "Ed25519Signer",
    "GroupSums",
    "GroupedServer",
    "Least",
    "MemoryReleases",
    "Metric",
    "QuantisedUpdate",
    "Quantiser",
    "Releases",
    "SecAggClient",
    "SecAggParameters",
    "SecAggServer",
    "SecureSum",
    "ServerPhase",
    "Session",
    "Signer",
    "Tally",
    "VectorSource",
    "choose_parameters",
    "combine_beacon",
    "commit",
    "largest_group",
    "make_groups",
    "overrun",
    "plain_groups",
    "plain_sum",
    "run_groups_in_memory",
    "run_in_memory",
]

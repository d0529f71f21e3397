#!/bin/sh
# Starts the ranks of this node for a silo with [cluster] launch = "external". Run it on every node.
#
#   STATE=/srv/roundtable/state HEAD=node01 NODES=2 DEVICES=8 sh torchrun.sh
#
# STATE is the agent's state folder and must be on a file system that all nodes share; the agent runs on HEAD,
# where rank 0 calls it over the socket in $STATE/cluster. The rendezvous is on HEAD as well.
set -eu
: "${STATE:?the agent's state folder}" "${HEAD:?name of the node on which the agent runs}"
# A restarted group must not find the keys of the one before it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# A collective that hangs ends the group and leaves a flight record behind.
export TORCH_NCCL_TRACE_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TORCH_NCCL_DEBUG_INFO_TEMP_FILE="$STATE/cluster/flight-recorder-"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-4}"
# Says at once what would otherwise be a hang: a port that is taken, an interface that is not there.
python -m roundtable.cluster.agent.preflight "$HEAD:${PORT:-29400}"
exec torchrun \
    --nnodes "${NODES:-1}" \
    --nproc-per-node "${DEVICES:-gpu}" \
    --max-restarts "${RESTARTS:-3}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$HEAD:${PORT:-29400}" \
    --rdzv-id "${JOB:-roundtable}" \
    -m roundtable.cluster.train.rank "$STATE/cluster"

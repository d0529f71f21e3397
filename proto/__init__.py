"""The wire contract: the .proto files and the code generated from them (tools/generate_proto.py)."""

import os

# A process with gRPC in it may fork others that never call it, such as the workers of a DataLoader in a
# script that has joined rounds. Under traffic gRPC's own handlers of forks abort about one of a hundred.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

PROTOCOL_VERSION = 1
CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20
EVENTS_AT_ONCE = 500
MOST_TOGETHER, TOGETHER_BYTES = 500, 1 << 20
"""What a trunk carries in one message: so many of others at most, and none more once it has so many bytes."""

__all__ = [
    "CHUNK_BYTES",
    "EVENTS_AT_ONCE",
    "MAX_MESSAGE_BYTES",
    "MOST_TOGETHER",
    "PROTOCOL_VERSION",
    "TOGETHER_BYTES",
]

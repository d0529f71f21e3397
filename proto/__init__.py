"""The wire contract: the .proto files and the code generated from them (tools/generate_proto.py)."""

PROTOCOL_VERSION = 1
CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20
EVENTS_AT_ONCE = 500

__all__ = ["CHUNK_BYTES", "EVENTS_AT_ONCE", "MAX_MESSAGE_BYTES", "PROTOCOL_VERSION"]

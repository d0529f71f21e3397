"""The wire contract: the .proto files and the code generated from them (tools/generate_proto.py)."""

PROTOCOL_VERSION = 1
CHUNK_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 4 << 20

__all__ = ["CHUNK_BYTES", "MAX_MESSAGE_BYTES", "PROTOCOL_VERSION"]

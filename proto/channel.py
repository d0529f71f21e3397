"""Channel options that both ends of the wire share.

Both sides ping at the same interval, also while no call is open, and the coordinator tolerates pings as
often as agents send them: so an idle connection through a firewall stays open, a dead one is noticed
within `KEEPALIVE_MS + KEEPALIVE_TIMEOUT_MS`, and nobody is ever told "too many pings". A connection without a
call is ended after `IDLE_MS`: an agent's control stream is a call, and an operator's next call connects anew.
"""

from __future__ import annotations

from roundtable.proto import MAX_MESSAGE_BYTES

KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
IDLE_MS = 30_000
WINDOW_BYTES = 1 << 20
"""What a call may have under way before its receiver has answered: gRPC begins with 64 KiB and doubles that
each round trip, which a small update would mostly spend on waiting."""

_SHARED: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
)

CLIENT_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED,
    ("grpc.http2.min_time_between_pings_ms", KEEPALIVE_MS // 2),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 5_000),
)
"""For `grpc.aio.secure_channel`, at agents and operators."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_SHARED,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 4),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # Who opens a connection and says nothing does not hold it for long, also one who answers pings and calls
    # nothing, nor many streams on one.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", IDLE_MS),
    ("grpc.max_concurrent_streams", 256),
    ("grpc.max_metadata_size", 16_384),
    # Compressed messages are not taken: a small one could become a large one in memory.
    ("grpc.compression_enabled_algorithms_bitset", 1),
)
"""For `grpc.aio.server`: a second server on the same port is an error, not a silent sharing of it."""

TLS_1_3_ONLY = {"GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-AES256-CBC-SHA"}
"""Environment, to be set before gRPC is imported. gRPC for Python cannot say which versions of TLS it speaks,
but which ciphers TLS 1.2 and older may use: the only one named here needs a pre-shared key, which nobody
has, so no handshake below TLS 1.3 comes to an end. The ciphers of TLS 1.3 are not concerned."""

__all__ = ["CLIENT_OPTIONS", "KEEPALIVE_MS", "KEEPALIVE_TIMEOUT_MS", "SERVER_OPTIONS", "TLS_1_3_ONLY"]

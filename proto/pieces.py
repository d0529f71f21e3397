"""Chunks between bytes and the wire without protobuf's copies.

The form is that of `Chunk` and of `UploadPart`: any protobuf peer reads and writes it. Protobuf copies the
data into a message, that message into the one around it, that one into the frame, and back again on the
other side, which takes longer than encrypting them. Here the data is copied once, into the frame, and what
is read is a view of the frame. A frame of any other shape goes the way of protobuf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import grpc
from typing_extensions import override

from roundtable.proto import agent_pb2, agent_pb2_grpc, common_pb2

_OFFSET, _DATA, _HEADER, _CHUNK = b"\x08", b"\x12", 0x0A, 0x12
_DOWNLOAD, _UPLOAD = "/roundtable.v1.Agents/Download", "/roundtable.v1.Agents/Upload"
_GET_ARTIFACT = "/roundtable.v1.Operators/GetArtifact"


class Piece(NamedTuple):
    """Bytes of an artifact and the place of the first: what a `Chunk` says."""

    offset: int
    data: bytes | memoryview


class Traffic:
    """Bytes of artifacts that this process has sent and received."""

    sent = received = 0

    def both(self) -> tuple[int, int]:
        """(sent, received)."""
        return self.sent, self.received


traffic = Traffic()


def chunk_frame(piece: Piece) -> bytes:
    """The piece as a serialized `Chunk`."""
    traffic.sent += len(piece.data)
    return b"".join((_chunk_head(piece), piece.data))


def part_frame(part: Piece | agent_pb2.UploadHeader) -> bytes:
    """The piece or the header as a serialized `UploadPart`."""
    if not isinstance(part, Piece):
        return agent_pb2.UploadPart(header=part).SerializeToString()
    traffic.sent += len(part.data)
    head = _chunk_head(part)
    return b"".join((bytes((_CHUNK,)), _varint(len(head) + len(part.data)), head, part.data))


def read_chunk(frame: bytes) -> Piece:
    """The piece in a serialized `Chunk`; its data lies in the frame. Raises protobuf's DecodeError."""
    traffic.received += len(frame)
    return _chunk_in(frame, 0) or _piece_of(common_pb2.Chunk.FromString(frame))


def read_part(frame: bytes) -> Piece | agent_pb2.UploadHeader | None:
    """What a serialized `UploadPart` holds; None if neither. Raises protobuf's DecodeError."""
    traffic.received += len(frame)
    if frame and frame[0] == _CHUNK:
        length, place = _read_varint(frame, 1)
        piece = _chunk_in(frame, place) if place + length == len(frame) else None
        if piece is not None:
            return piece
    part = agent_pb2.UploadPart.FromString(frame)
    kind = part.WhichOneof("part")
    if kind == "chunk":
        return _piece_of(part.chunk)
    return part.header if kind == "header" else None


def agents_stub(channel: grpc.aio.Channel) -> agent_pb2_grpc.AgentsAsyncStub:
    """The generated stub, with `Download` giving pieces and `Upload` taking a header and pieces."""
    generated: Any = agent_pb2_grpc.AgentsStub(channel)
    generated.Download = channel.unary_stream(
        _DOWNLOAD,
        request_serializer=common_pb2.DownloadRequest.SerializeToString,
        response_deserializer=read_chunk,
    )
    generated.Upload = channel.stream_unary(
        _UPLOAD, request_serializer=part_frame, response_deserializer=agent_pb2.UploadReceipt.FromString
    )
    stub: agent_pb2_grpc.AgentsAsyncStub = generated
    return stub


class PieceHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The methods that move artifacts. To be added to a server before the generated handlers."""

    def __init__(self, agents: Any, operators: Any = None) -> None:
        request = common_pb2.DownloadRequest.FromString
        self._methods = {
            _DOWNLOAD: grpc.unary_stream_rpc_method_handler(agents.Download, request, chunk_frame),
            _UPLOAD: grpc.stream_unary_rpc_method_handler(
                agents.Upload, read_part, agent_pb2.UploadReceipt.SerializeToString
            ),
        }
        if operators is not None:
            self._methods[_GET_ARTIFACT] = grpc.unary_stream_rpc_method_handler(
                operators.GetArtifact, request, chunk_frame
            )

    @override
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return self._methods.get(handler_call_details.method)


def _piece_of(chunk: common_pb2.Chunk) -> Piece:
    return Piece(chunk.offset, chunk.data)


def _chunk_head(piece: Piece) -> bytes:
    offset = _OFFSET + _varint(piece.offset) if piece.offset else b""
    return offset + _DATA + _varint(len(piece.data))


def _chunk_in(frame: bytes, place: int) -> Piece | None:
    """The chunk that begins at `place` and ends with the frame, if it has its usual form."""
    offset = 0
    if frame[place : place + 1] == _OFFSET:
        offset, place = _read_varint(frame, place + 1)
    if frame[place : place + 1] != _DATA:
        return None
    length, place = _read_varint(frame, place + 1)
    if place + length != len(frame):
        return None
    return Piece(offset, memoryview(frame)[place:])


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def _read_varint(frame: bytes, place: int) -> tuple[int, int]:
    """(value, place behind it); a place beyond the frame where it is cut short or too long for 64 bits."""
    value = 0
    for count, digit in enumerate(frame[place : place + 10]):
        value |= (digit & 0x7F) << (7 * count)
        if digit < 0x80:
            return (value, place + count + 1) if value < 1 << 64 else (0, len(frame) + 1)
    return 0, len(frame) + 1


__all__ = [
    "Piece",
    "PieceHandlers",
    "agents_stub",
    "chunk_frame",
    "part_frame",
    "read_chunk",
    "read_part",
    "traffic",
]

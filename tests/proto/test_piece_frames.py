"""Frames made by hand are protobuf's, to the byte, and are read whatever form they have."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from roundtable.proto import agent_pb2, common_pb2
from roundtable.proto.pieces import Piece, chunk_frame, part_frame, read_chunk, read_part

offsets = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 127, 128, 2**14, 2**32, 2**63])
pieces = st.builds(Piece, offsets, st.binary(max_size=300))


@given(pieces.filter(lambda piece: len(piece.data) > 0))
def test_a_frame_is_what_protobuf_would_write(piece: Piece) -> None:
    chunk = common_pb2.Chunk(offset=piece.offset, data=bytes(piece.data))
    assert chunk_frame(piece) == chunk.SerializeToString()
    assert part_frame(piece) == agent_pb2.UploadPart(chunk=chunk).SerializeToString()


@given(pieces)
def test_protobuf_reads_a_frame(piece: Piece) -> None:
    chunk = common_pb2.Chunk.FromString(chunk_frame(piece))
    assert (chunk.offset, chunk.data) == piece
    part = agent_pb2.UploadPart.FromString(part_frame(piece))
    assert (part.chunk.offset, part.chunk.data) == piece


@given(pieces)
def test_what_protobuf_wrote_is_read(piece: Piece) -> None:
    chunk = common_pb2.Chunk(offset=piece.offset, data=bytes(piece.data))
    assert read_chunk(chunk.SerializeToString()) == piece
    assert read_part(agent_pb2.UploadPart(chunk=chunk).SerializeToString()) == piece


def test_a_header_goes_the_way_of_protobuf() -> None:
    header = agent_pb2.UploadHeader(layout="abc", offset=7)
    assert read_part(part_frame(header)) == header
    assert read_part(b"") is None


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(b"\x12\x03abc\x08\x05", id="data before its offset"),
        pytest.param(b"\x08\x05\x12\x03abc\x18\x01", id="a field of a later version"),
        pytest.param(b"\x08\x85\x80\x00\x12\x03abc", id="an offset in more bytes than it needs"),
        pytest.param(b"\x08\x01\x08\x05\x12\x03abc", id="a field twice"),
    ],
)
def test_unusual_forms_are_read_as_protobuf_reads_them(frame: bytes) -> None:
    assert read_chunk(frame) == Piece(5, b"abc")
    assert read_part(b"\x12" + bytes((len(frame),)) + frame) == Piece(5, b"abc")


@given(st.binary(max_size=40))
def test_any_bytes_mean_what_they_mean_to_protobuf(frame: bytes) -> None:
    for read, message in ((read_chunk, common_pb2.Chunk), (read_part, agent_pb2.UploadPart)):
        try:
            expected = message.FromString(frame)
        except DecodeError:
            with pytest.raises(DecodeError):
                read(frame)
            continue
        if isinstance(expected, agent_pb2.UploadPart):
            kind = expected.WhichOneof("part")
            if kind != "chunk":
                assert read(frame) == (expected.header if kind == "header" else None)
                continue
            expected = expected.chunk
        assert read(frame) == (expected.offset, expected.data)

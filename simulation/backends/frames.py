"""Messages between a simulation and its workers: JSON and raw tensors over a socket pair, no pickle.

4 bytes   length of the header, little-endian
header    JSON; "blobs" holds the lengths of what follows
blobs     safetensors files: named tensors
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class PeerGone(Exception):
    """The process at the other end has ended."""


class Channel:
    """One end of the connection between a simulation and one worker."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def fileno(self) -> int:
        """Gives the socket's descriptor, by which `select` waits for it."""
        return self.connection.fileno()

    def send(
        self, message: Mapping[str, Any], tensors: Sequence[Tensors] = (), descriptors: Sequence[int] = ()
    ) -> None:
        """Raises PeerGone if nobody is there to read."""
        blobs = [safetensors.torch.save({n: t.contiguous() for n, t in part.items()}) for part in tensors]
        header = json.dumps({**message, "blobs": [len(blob) for blob in blobs]}).encode()
        try:
            start = struct.pack("<I", len(header))
            if descriptors:
                socket.send_fds(self.connection, [start], list(descriptors))
            else:
                self.connection.sendall(start)
            self.connection.sendall(b"".join([header, *blobs]))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone from error

    def receive(self, descriptors: int = 0) -> tuple[dict[str, Any], list[dict[str, Tensor]], list[int]]:
        """The next message, its tensors, and file descriptors if so many may come. Raises PeerGone."""
        try:
            received: list[int] = []
            if descriptors:
                start, received, _, _ = socket.recv_fds(self.connection, 4, descriptors)
                start += self._exactly(4 - len(start))
            else:
                start = self._exactly(4)
            header = json.loads(self._exactly(struct.unpack("<I", start)[0]))
            blobs = [safetensors.torch.load(self._exactly(length)) for length in header.pop("blobs")]
        except ConnectionResetError as error:
            raise PeerGone from error
        return header, blobs, received

    def close(self) -> None:
        """Closes this end."""
        self.connection.close()

    def _exactly(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self.connection.recv_into(view)
            if not got:
                raise PeerGone
            view = view[got:]
        return bytes(data)

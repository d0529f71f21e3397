"""Messages between a process and its workers: JSON and raw tensors over a socket pair, no pickle.

4 bytes   length of the header, little-endian
header    JSON; "blobs" holds the lengths of what follows
blobs     safetensors files: named tensors
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import safetensors.torch
from torch import Tensor

Tensors = Mapping[str, Tensor]


class PeerGone(Exception):
    """The process at the other end has ended."""


Message = tuple[dict[str, Any], list[dict[str, Tensor]], list[int]]


class Channel:
    """One end of the connection between a process and one of its workers.

    Both may send more at once than the connection holds. One end `yields`: while the other does not read, it
    takes in what the other sends and keeps it for `receive`. Else each could wait for the other to read.
    """

    def __init__(self, connection: socket.socket, *, yields: bool = False) -> None:
        self.connection = connection
        self._yields = yields
        self._kept: deque[Message] = deque()

    @property
    def keeps(self) -> bool:
        """Whether a message is there that `receive` gives without waiting, though nothing can be read."""
        return bool(self._kept)

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
                self._write(start)
            self._write(b"".join([header, *blobs]))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone from error

    def receive(self, descriptors: int = 0) -> Message:
        """The next message, its tensors, and file descriptors if so many may come. Raises PeerGone."""
        return self._kept.popleft() if self._kept else self._read(descriptors)

    def _write(self, data: bytes) -> None:
        if not self._yields:
            self.connection.sendall(data)
            return
        left = memoryview(data)
        while left:
            readable, writable, _ = select.select([self.connection], [self.connection], [])
            if writable:
                with contextlib.suppress(BlockingIOError):
                    left = left[self.connection.send(left, socket.MSG_DONTWAIT) :]
            elif readable:
                self._kept.append(self._read(0))

    def _read(self, descriptors: int) -> Message:
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

"""Messages between a process and its workers: JSON and raw tensors over a socket pair, no pickle.

4 bytes   length of the header, little-endian
header    JSON; "tensors" says the names, dtypes and shapes of what follows
values    of the tensors, one after the other, each from a multiple of 64 bytes on; where they are many, in
          shared memory whose descriptor comes with the message, so that nobody waits until they are read
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import os
import select
import socket
import struct
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from roundtable.core.workers.shared_vectors import anonymous_memory

Tensors = Mapping[str, Tensor]
_SHARED_FROM = 1 << 16
_ALIGNMENT = 64
_MOST_DESCRIPTORS = 2


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
        """Raises PeerGone if nobody is there to read; MemoryError or OSError without room for values."""
        kinds = [[(name, *_kind(tensor)) for name, tensor in part.items()] for part in tensors]
        parts = list(_bytes_of(tensor for part in tensors for tensor in part.values()))
        size = sum(map(len, parts))
        shared = size if size >= _SHARED_FROM else 0
        header = json.dumps({**message, "tensors": kinds, "shared": shared}).encode()
        frame = [struct.pack("<I", len(header)), header]
        try:
            if not shared:
                self._write(b"".join([*frame, *parts]), descriptors)
                return
            memory = anonymous_memory(size)
            try:
                with open(memory, "wb", closefd=False) as file:
                    file.writelines(parts)
                self._write(b"".join(frame), [*descriptors, memory])
            finally:
                os.close(memory)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise PeerGone from error

    def receive(self) -> Message:
        """The next message, its tensors, and the descriptors that came with it. Raises PeerGone.

        Many values lie in memory that this process alone has mapped, and only as long as a tensor of them is
        there: keep a copy of what is to stay.
        """
        return self._kept.popleft() if self._kept else self._read()

    def _write(self, data: bytes, descriptors: Sequence[int]) -> None:
        left, flags = memoryview(data), socket.MSG_DONTWAIT if self._yields else 0
        while left:
            if self._yields and not self._writable():
                continue
            with contextlib.suppress(BlockingIOError):
                # Not socket.send_fds, which drops the flags.
                beside = (
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
                )
                left, descriptors = left[self.connection.sendmsg([left], beside, flags) :], ()

    def _writable(self) -> bool:
        """Waits until there is room; takes in what comes meanwhile."""
        readable, writable, _ = select.select([self.connection], [self.connection], [])
        if readable and not writable:
            self._kept.append(self._read())
        return bool(writable)

    def _read(self) -> Message:
        try:
            start, received, _, _ = socket.recv_fds(self.connection, 4, _MOST_DESCRIPTORS)
            start += self._exactly(4 - len(start))
            header = json.loads(self._exactly(struct.unpack("<I", start)[0]))
            kinds, shared = header.pop("tensors"), header.pop("shared")
            data: bytearray | mmap.mmap
            if shared:
                memory = received.pop()
                data = mmap.mmap(memory, shared)
                os.close(memory)
            else:
                data = self._exactly(_length(kinds))
        except ConnectionResetError as error:
            raise PeerGone from error
        return header, _tensors_in(data, kinds), received

    def close(self) -> None:
        """Closes this end."""
        self.connection.close()

    def _exactly(self, count: int) -> bytearray:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self.connection.recv_into(view)
            if not got:
                raise PeerGone
            view = view[got:]
        return data


def _kind(tensor: Tensor) -> tuple[str, list[int]]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape)


def _bytes_of(tensors: Iterator[Tensor]) -> Iterator[memoryview | bytes]:
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        yield flat.view(torch.uint8).numpy().data
        yield bytes(-flat.nbytes % _ALIGNMENT)


def _length(kinds: Sequence[Sequence[tuple[str, str, Sequence[int]]]]) -> int:
    sizes = (getattr(torch, dtype).itemsize * math.prod(shape) for part in kinds for _, dtype, shape in part)
    return sum(size + -size % _ALIGNMENT for size in sizes)


def _tensors_in(
    data: bytearray | mmap.mmap, kinds: Sequence[Sequence[tuple[str, str, Sequence[int]]]]
) -> list[dict[str, Tensor]]:
    """The tensors, which keep the memory alive that they lie in."""
    found, start = [], 0
    for part in kinds:
        tensors = {}
        for name, named, shape in part:
            dtype, count = getattr(torch, named), math.prod(shape)
            size = dtype.itemsize * count
            flat = (
                torch.frombuffer(data, dtype=dtype, count=count, offset=start)
                if count
                else torch.empty(0, dtype=dtype)
            )
            tensors[name] = flat.view(shape)
            start += size + -size % _ALIGNMENT
        found.append(tensors)
    return found

"""Sends text between ranks as bytes in tensors: torch's own object collectives would pickle it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_text(text: str | None, group: dist.ProcessGroup | None = None) -> str:
    """Returns rank 0's text on every rank of a CPU group; the others' argument is ignored."""
    data = _bytes(text or "")
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0, group=group)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8)
    if len(data):
        dist.broadcast(data, 0, group=group)
    return data.numpy().tobytes().decode()


def gather_text(text: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Returns the texts of all ranks, in their order, on every rank."""
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    data = _bytes(text).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    longest = max(1, *(int(size) for size in sizes))
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return [
        part[: int(size)].cpu().numpy().tobytes().decode() for part, size in zip(parts, sizes, strict=True)
    ]


def gather_names(names: list[str]) -> list[list[str]]:
    """Returns the lists of all ranks, in their order, on every rank."""
    return [text.split("\n") if text else [] for text in gather_text("\n".join(names))]


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()) or bytearray(1), dtype=torch.uint8)[: len(text.encode())]

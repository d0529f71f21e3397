"""Batches of every kind go to a device whole, in one process and on ranks."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from pretended_gpu import GPU, PretendedGpu
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from roundtable.client.batch_tensors import changed, examples_in, moved


class Pair(NamedTuple):
    x: Tensor
    name: str


class Encoding(UserDict[str, Any]):
    """As those of transformers' tokenizers."""


@dataclass
class Graph:
    nodes: Tensor

    def to(self, device: torch.device) -> Graph:
        return Graph(self.nodes.to(device))


def test_each_tensor_of_a_batch_is_moved_and_nothing_else() -> None:
    x = torch.arange(6.0).view(3, 2)
    batch = [
        Pair(x, "a"),
        Encoding(ids=x, text=["b", "c", "d"]),
        OrderedDict(y=(x, 3)),
        Graph(x),
        {"none": None},
    ]
    with PretendedGpu():
        pair, encoding, ordered, graph, plain = moved(batch, GPU)
        there = [pair.x, encoding["ids"], ordered["y"][0], graph.nodes]
        assert [each.device.type for each in there] == ["cuda"] * 4
    assert (type(pair), type(encoding), type(ordered)) == (Pair, Encoding, OrderedDict)
    assert (pair.name, encoding["text"], ordered["y"][1], plain) == ("a", ["b", "c", "d"], 3, {"none": None})
    assert batch[1]["ids"] is x, "the batch itself stays as it was"
    assert moved(batch, torch.device("cpu")) is batch


def test_lengths_of_packed_sequences_stay_in_the_host_s_memory() -> None:
    packed = pack_sequence([torch.ones(2), torch.ones(5), torch.ones(1)], enforce_sorted=False)
    seen: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor

    again = changed({"x": packed}, note)["x"]
    assert isinstance(again, PackedSequence)
    assert {id(each) for each in seen} == {
        id(packed.data),
        id(packed.sorted_indices),
        id(packed.unsorted_indices),
    }
    assert again.batch_sizes is packed.batch_sizes


def test_examples_are_counted_in_every_kind() -> None:
    x = torch.zeros(3, 2)
    packed = pack_sequence([torch.ones(2), torch.ones(5), torch.ones(1)], enforce_sorted=False)
    for batch in (x, (x, 1), {"x": x}, Encoding(x=x), Pair(x, "a"), packed, [packed, x]):
        assert examples_in(batch) == 3, batch
    assert examples_in(torch.tensor(1.0)) == examples_in([]) == 1

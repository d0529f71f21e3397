"""A CUDA that computes nothing, for a build of torch without one: fake tensors, a group of one, and a record.

What autograd asks of CUDA (`fake_cuda.cpp`) has to be there before torch is, by LD_PRELOAD, in a process that
has nothing else to do.
"""

from __future__ import annotations

import ctypes
import os
import pickle
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "_allgather_base",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "alltoall",
    "alltoall_base",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
)


class Stream:
    """Of kernels that are not launched."""

    cuda_stream, stream_id, device_index, device_type = 0, 0, 0, 1

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.device = torch.device("cuda", 0)

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> Event:
        """One that has been reached."""
        return event or Event()

    def synchronize(self) -> None:
        """The host waits."""
        WAITS.append("stream")


class Event:
    """Reached at once; that the host waited for it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        """Reached."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Reached."""
        return True

    def synchronize(self) -> None:
        """The host waits."""
        WAITS.append("event")

    def elapsed_time(self, other: Any) -> float:
        """Milliseconds."""
        return 1.0


WAITS: list[str] = []
"""What the host waited for, since it was last cleared."""
_ONE = Stream()


def pretend() -> None:
    """Puts the stand-in in the place of `torch.cuda`'s own; for good, in this process."""

    class Properties:
        name, total_memory, major, minor, multi_processor_count = "NVIDIA H100", 80 << 30, 9, 0, 132

    def waits(*args: Any) -> None:
        WAITS.append("device")

    stands_in: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "_lazy_init": lambda: None,
        "device_count": lambda: 8,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
        "device": lambda device: nullcontext(),
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: _ONE,
        "default_stream": lambda device=None: _ONE,
        "synchronize": waits,
        "get_device_properties": lambda device=None: Properties,
        "get_device_name": lambda device=None: Properties.name,
        "get_device_capability": lambda device=None: (9, 0),
        "is_bf16_supported": lambda *args, **kwargs: True,
        "max_memory_allocated": lambda device=None: 1,
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
    }
    ctypes.CDLL(os.environ["LD_PRELOAD"]).take_over()
    for name, stand_in in stands_in.items():
        setattr(torch.cuda, name, stand_in)
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign]
    # Times of a GPU's events, which DDP logs.
    dist.Logger.set_runtime_stats_and_log = lambda self: None  # type: ignore[attr-defined,method-assign]
    dist.Backend.register_backend(
        "recorded", lambda store, rank, size, timeout: Group(rank, size), devices=["cpu", "cuda"]
    )
    fake_tensor.init_gpu_context = lambda *args: None  # type: ignore[attr-defined]
    worked_out = ShardingPropagator._propagate_tensor_meta_non_cached

    def shapes_alone(propagator: Any, schema: Any) -> Any:
        # Of its tensors, which are made up for the shape of a result, nothing is true.
        with _disable_current_modes():
            return worked_out(propagator, schema)

    ShardingPropagator._propagate_tensor_meta_non_cached = shapes_alone  # type: ignore[method-assign]


def objects_through(store: dist.Store) -> None:
    """What ranks tell each other as objects arrives: it goes through here, as nothing of it is computed."""
    counts: Counter[tuple[int, int]] = Counter()

    def place(source: int, to: int) -> str:
        counts[source, to] += 1
        return f"{source} to {to}: {counts[source, to]}"

    def shape(tensor: Tensor) -> Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def send(objects: list[Any], dst: int, **kwargs: Any) -> None:
        with fake_tensor.unset_fake_temporarily():
            # Stages of older torch tell each other of tensors by tensors, here without values too.
            plain = tree_map_only(Tensor, shape, objects)
            store.set(place(dist.get_rank(), dst), pickle.dumps(plain).hex())

    def receive(objects: list[Any], src: int, **kwargs: Any) -> int:
        told = store.get(place(src, dist.get_rank())).decode()
        with fake_tensor.unset_fake_temporarily():
            objects[:] = pickle.loads(bytes.fromhex(told))  # noqa: S301
        return src

    dist.send_object_list, dist.recv_object_list = send, receive


EXCHANGES: list[tuple[str, tuple[int, ...], str, int]] = []
"""Each exchange since it was last cleared: what it was, its ranks, the type of its tensors, their entries."""
ON_CPU: list[str] = []
"""Exchanges and products of tensors that were not on the device."""


class Group(dist.ProcessGroup):
    """One rank's end of a process group whose exchanges leave every tensor as it is, done at once."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)

    def getBackendName(self) -> str:
        """As torch knows it."""
        return "recorded"

    @property
    def pg_name(self) -> str:
        """As torch knows it."""
        return dist.distributed_c10d._world.pg_names[self]

    group_name = pg_name


def _exchange(name: str) -> Any:
    def exchange(self: Group, *args: Any, **kwargs: Any) -> Any:
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        note_exchange(name, tuple(dist.get_process_group_ranks(self)), tensors)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(args[0] if args else None)
        return torch._C._distributed_c10d._create_work_from_future(done)

    return exchange


def note_exchange(name: str, ranks: tuple[int, ...], tensors: list[Tensor]) -> None:
    """Writes down one exchange."""
    if any(each.device.type != "cuda" for each in tensors):
        ON_CPU.append(name)
    kind = str(tensors[-1].dtype) if tensors else ""
    # A method of the group or an operator, by the version of torch.
    EXCHANGES.append((name.strip("_"), ranks, kind, sum(each.numel() for each in tensors)))


for _name in _METHODS:
    setattr(Group, _name, _exchange(_name))


class Record(TorchDispatchMode):
    """What a step asks of a device: the types of its products, and where the host waits.

    Fake tensors themselves refuse operators over tensors of a CPU and of a GPU.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.products: set[str] = set()
        self.reads: list[str] = []
        self.copies: list[str] = []

    def clear(self) -> None:
        """Begins anew."""
        for each in (EXCHANGES, ON_CPU, WAITS, self.products, self.reads, self.copies):
            each.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        name = func.name()
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        if not _bound_for_cuda(given) and not any(isinstance(each, FakeTensor) for each in tensors):
            # Meshes, batches: what is computed of them on the CPU is true.
            with _disable_current_modes():
                return func(*args, **given)
        args, given = tree_map_only(Tensor, self._faked, (args, given))
        tensors = [each for each in tree_leaves((args, given)) if isinstance(each, Tensor)]
        if name.startswith("c10d::"):
            return self._exchanged(name.split("::")[1], args, tensors)
        if name.startswith("_c10d_functional::") and "wait_tensor" not in name:
            named = next(each for each in reversed(args) if isinstance(each, str))
            group = dist.distributed_c10d._resolve_process_group(named)
            note_exchange(name.split("::")[1], tuple(dist.get_process_group_ranks(group)), tensors)
        elif name == "aten::_local_scalar_dense":
            if args[0].device.type == "cuda":
                self.reads.append(str(tuple(args[0].shape)))
            return 0.0 if args[0].is_floating_point() else 0
        elif name == "aten::equal":
            self.reads.append("equal")
            return True
        elif name.startswith("aten::_fused_"):
            # They change tensors in place, and have no form for fake ones.
            assert len({each.device.type for each in tensors}) == 1, name
            return None
        elif name in ("aten::mm", "aten::addmm"):
            self.products.add(str(tensors[-1].dtype))
            if tensors[-1].device.type == "cpu":
                ON_CPU.append(name)
        elif name in ("aten::_to_copy", "aten::copy_"):
            self._copied(name, args, given, tensors)
        return func(*args, **given)

    def _faked(self, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor)

    def _exchanged(self, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> Any:
        boxed = next(each for each in args if isinstance(each, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        note_exchange(name, tuple(dist.get_process_group_ranks(group)), tensors)
        done: torch.futures.Future[Any] = torch.futures.Future()
        done.set_result(args[0])
        work = torch._C._distributed_c10d._create_work_from_future(done).boxed()
        return work if len(getattr(torch.ops.c10d, name).default._schema.returns) == 1 else (args[0], work)

    def _copied(self, name: str, args: tuple[Any, ...], given: dict[str, Any], tensors: list[Tensor]) -> None:
        if name == "aten::copy_":
            kinds = [each.device.type for each in tensors[:2]]
            waits = not (args[2] if len(args) > 2 else given.get("non_blocking", False))
        else:
            there = given.get("device") or tensors[0].device
            kinds = [torch.device(there).type, tensors[0].device.type]
            waits = not given.get("non_blocking", False)
        if len(set(kinds)) > 1 and waits:
            self.copies.append(f"{kinds[1]} to {kinds[0]}: {tuple(tensors[-1].shape)}")


def _bound_for_cuda(given: dict[str, Any]) -> bool:
    if given.get("pin_memory"):
        return True
    return given.get("device") is not None and torch.device(given["device"]).type == "cuda"


@contextmanager
def recorded(rank: int, world: int) -> Iterator[Record]:
    """This process as a rank of a group whose collectives do nothing."""
    dist.init_process_group("recorded", store=FakeStore(), rank=rank, world_size=world)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, Record(mode) as record:
            # As that mode does where no GPU can be asked.
            torch._C._set_only_lift_cpu_tensors(True)
            yield record
    finally:
        dist.destroy_process_group()

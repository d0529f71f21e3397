"""What Flower's message API hands to a handler: arrays, metrics and settings by name.

Written after the public documentation of Flower 1.42 (`flwr.app`), for apps that run here without Flower.
Unlike there nothing is serialised, and numbers of NumPy are taken for what they are.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

V = TypeVar("V")


class Array:
    """One array; `numpy()` gives a copy."""

    def __init__(
        self,
        dtype: Any = None,
        shape: Sequence[int] | None = None,
        stype: str = "numpy.ndarray",
        data: bytes | None = None,
        *,
        ndarray: np.ndarray | None = None,
        torch_tensor: Tensor | None = None,
    ) -> None:
        given = dtype if isinstance(dtype, (np.ndarray, Tensor)) else None
        given = next((each for each in (ndarray, torch_tensor, given) if each is not None), None)
        if given is None and data is not None:
            given = np.load(io.BytesIO(data), allow_pickle=False)
        if given is None:
            raise TypeError("Array takes a NumPy array, a tensor, or dtype, shape, stype and data")
        self._values = _copied(given)
        self.dtype = str(self._values.dtype)
        self.shape = tuple(self._values.shape)
        self.stype = stype

    @property
    def data(self) -> bytes:
        """The array in NumPy's file format."""
        buffer = io.BytesIO()
        np.save(buffer, self._values, allow_pickle=False)
        return buffer.getvalue()

    def numpy(self) -> np.ndarray:
        """A copy."""
        return self._values.copy()

    @classmethod
    def from_numpy_ndarray(cls, ndarray: np.ndarray) -> Array:
        """An array with a copy of these values."""
        return cls(ndarray)

    @classmethod
    def from_torch_tensor(cls, tensor: Tensor) -> Array:
        """An array with a copy of these values."""
        return cls(tensor)


class CheckedDict(MutableMapping[str, V]):
    """A dict that refuses keys that are no text, and values of other kinds."""

    def __init__(self, values: Mapping[str, V] | None = None) -> None:
        self._items: dict[str, V] = {}
        self.update(values or {})

    def checked(self, key: str, value: V) -> V:
        """The value as it is kept; TypeError where it does not belong here."""
        raise NotImplementedError

    @override
    def __setitem__(self, key: str, value: V) -> None:
        if not isinstance(key, str):
            raise TypeError(f"a key of {type(self).__name__} must be text, not {type(key).__name__}")
        self._items[key] = self.checked(key, value)

    @override
    def __getitem__(self, key: str) -> V:
        return self._items[key]

    @override
    def __delitem__(self, key: str) -> None:
        del self._items[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    @override
    def __len__(self) -> int:
        return len(self._items)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._items!r})"

    def copy(self) -> CheckedDict[V]:
        """Another one with the same values."""
        return type(self)(self._items)


class ArrayRecord(CheckedDict[Array]):
    """Arrays by name: of a state_dict, of a list (then "0", "1", ...) or of a dict of Array."""

    def __init__(
        self,
        arrays: Any = None,
        *,
        numpy_ndarrays: list[np.ndarray] | None = None,
        torch_state_dict: Mapping[str, Tensor] | None = None,
        array_dict: Mapping[str, Array] | None = None,
        keep_input: bool = True,
    ) -> None:
        super().__init__()
        for given in (arrays, numpy_ndarrays, torch_state_dict, array_dict):
            if isinstance(given, (list, tuple)):
                self.update({str(place): Array(np.asarray(each)) for place, each in enumerate(given)})
            elif isinstance(given, Mapping):
                self.update(
                    {name: each if isinstance(each, Array) else Array(each) for name, each in given.items()}
                )
            elif given is not None:
                raise TypeError(f"ArrayRecord takes a list or dict of arrays, not a {type(given).__name__}")
            if not keep_input and isinstance(given, (list, dict)):
                given.clear()

    @override
    def checked(self, key: str, value: Array) -> Array:
        if not isinstance(value, Array):
            raise TypeError(f"{key!r} must be an Array, not a {type(value).__name__}")
        return value

    @classmethod
    def from_numpy_ndarrays(cls, ndarrays: list[np.ndarray], *, keep_input: bool = True) -> ArrayRecord:
        """The record of a list."""
        return cls(ndarrays, keep_input=keep_input)

    @classmethod
    def from_torch_state_dict(
        cls, state_dict: Mapping[str, Tensor], *, keep_input: bool = True
    ) -> ArrayRecord:
        """The record of a state_dict."""
        return cls(state_dict, keep_input=keep_input)

    def to_numpy_ndarrays(self, *, keep_input: bool = True) -> list[np.ndarray]:
        """Copies, in the record's order."""
        arrays = [each.numpy() for each in self.values()]
        if not keep_input:
            self.clear()
        return arrays

    def to_torch_state_dict(self, *, keep_input: bool = True) -> OrderedDict[str, Tensor]:
        """Copies, for `load_state_dict`."""
        state = OrderedDict((name, torch.from_numpy(each.numpy())) for name, each in self.items())
        if not keep_input:
            self.clear()
        return state


class ScalarRecord(CheckedDict[Any]):
    """Single values, and lists of them."""

    kinds: tuple[type, ...] = (int, float)

    @override
    def checked(self, key: str, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self.checked(key, each) for each in value]
        plain = value.item() if isinstance(value, np.generic) else value
        if isinstance(plain, self.kinds) and (bool in self.kinds or not isinstance(plain, bool)):
            return plain
        names = ", ".join(kind.__name__ for kind in self.kinds)
        raise TypeError(f"{type(self).__name__}: {key!r} is a {type(value).__name__}; it takes {names}")


class MetricRecord(ScalarRecord):
    """Numbers by name."""

    def __init__(self, metric_dict: Mapping[str, Any] | None = None, keep_input: bool = True) -> None:
        super().__init__(metric_dict)


class ConfigRecord(ScalarRecord):
    """Settings by name."""

    kinds = (int, float, str, bytes, bool)

    def __init__(self, config_dict: Mapping[str, Any] | None = None, keep_input: bool = True) -> None:
        super().__init__(config_dict)


Record = ArrayRecord | MetricRecord | ConfigRecord


class RecordDict(CheckedDict[Any]):
    """Records by name: a message's content."""

    def __init__(self, records: Mapping[str, Record] | None = None) -> None:
        super().__init__(records)

    @override
    def checked(self, key: str, value: Any) -> Any:
        if not isinstance(value, Record):
            raise TypeError(f"{key!r} must be a record of arrays, metrics or settings, not a {type(value)}")
        return value

    @property
    def array_records(self) -> RecordView:
        """Those of arrays."""
        return RecordView(self, ArrayRecord)

    @property
    def metric_records(self) -> RecordView:
        """Those of metrics."""
        return RecordView(self, MetricRecord)

    @property
    def config_records(self) -> RecordView:
        """Those of settings."""
        return RecordView(self, ConfigRecord)


class RecordView(MutableMapping[str, Any]):
    """The records of one kind; what is put in is put into the whole."""

    def __init__(self, whole: RecordDict, kind: type) -> None:
        self._whole = whole
        self._kind = kind

    @override
    def __getitem__(self, key: str) -> Any:
        value = self._whole[key]
        if not isinstance(value, self._kind):
            raise KeyError(key)
        return value

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        if not isinstance(value, self._kind):
            raise TypeError(f"{key!r} must be a {self._kind.__name__}, not a {type(value).__name__}")
        self._whole[key] = value

    @override
    def __delitem__(self, key: str) -> None:
        self[key]
        del self._whole[key]

    @override
    def __iter__(self) -> Iterator[str]:
        return (name for name, value in self._whole.items() if isinstance(value, self._kind))

    @override
    def __len__(self) -> int:
        return sum(1 for _ in self)


class NoState(RecordDict):
    """`context.state`, empty each round: putting something in calls `refuse`."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        self._refuse = refuse
        super().__init__()

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        self._refuse()


def _copied(values: np.ndarray | Tensor) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy().copy()
    return np.array(values)

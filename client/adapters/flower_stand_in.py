"""The names that an app imports of Flower, while it runs here: `flwr` as far as a client needs it.

What a client cannot mean here (strategies, a grid, Flower's own mods of privacy) is refused where it is
named, with what stands in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

from roundtable.client.adapters import flower_records as records
from roundtable.client.adapters.stand_ins import StandIns

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)
_DEFAULT = "default"
_log = getLogger("flwr")


@dataclass
class MessageMetadata:
    """Where a message comes from and what it asks for."""

    run_id: int = 0
    message_id: str = ""
    src_node_id: int = 0
    dst_node_id: int = 0
    reply_to_message_id: str = ""
    group_id: str = ""
    created_at: float = 0.0
    ttl: float = 0.0
    message_type: str = "train"


class Message:
    """A message to a handler, or its answer: `Message(content, reply_to=message)`."""

    def __init__(
        self,
        content: records.RecordDict | None = None,
        dst_node_id: int = 0,
        message_type: str = "train",
        *,
        ttl: float | None = None,
        group_id: str | None = None,
        error: Any = None,
        reply_to: Message | None = None,
    ) -> None:
        asked: MessageMetadata | None = None if reply_to is None else reply_to.metadata
        self.metadata: MessageMetadata = MessageMetadata(
            dst_node_id=dst_node_id if asked is None else asked.src_node_id,
            src_node_id=0 if asked is None else asked.dst_node_id,
            message_type=message_type if asked is None else asked.message_type,
            group_id=(group_id or "") if asked is None else asked.group_id,
            ttl=ttl or 0.0,
        )
        self._content = content
        self.error = error

    @property
    def content(self) -> records.RecordDict:
        """The records; ValueError where the message holds an error."""
        if self._content is None:
            raise ValueError("this message has no content")
        return self._content

    @content.setter
    def content(self, value: records.RecordDict) -> None:
        self._content = value

    def has_content(self) -> bool:
        """Whether it holds records."""
        return self._content is not None

    def has_error(self) -> bool:
        """Whether it holds an error."""
        return self.error is not None


@dataclass
class AppContext:
    """Where a handler runs (`flwr.app.Context`)."""

    run_id: int
    node_id: int
    node_config: Mapping[str, Any]
    state: Any
    run_config: Mapping[str, Any]
    series_id: int = 0


class ClientApp:
    """Handlers of `train` and `evaluate`, or a `client_fn`; called with a message and a context."""

    def __init__(self, client_fn: Handler | None = None, mods: list[Handler] | None = None) -> None:
        self.client_fn = client_fn
        self.mods = mods or []
        self.handlers: dict[str, Handler] = {}
        self._lifespan: Callable[[AppContext], Iterator[None]] | None = None

    def train(self, action: str = _DEFAULT, *, mods: list[Handler] | None = None) -> Callable[[F], F]:
        """Registers what trains."""
        return self._registered("train", action, mods)

    def evaluate(self, action: str = _DEFAULT, *, mods: list[Handler] | None = None) -> Callable[[F], F]:
        """Registers what measures."""
        return self._registered("evaluate", action, mods)

    def query(self, action: str = _DEFAULT, *, mods: list[Handler] | None = None) -> Callable[[F], F]:
        """Registers what answers a question."""
        return self._registered("query", action, mods)

    def lifespan(self) -> Callable[[F], F]:
        """Registers a generator that yields once: what is before and after a handler."""

        def register(function: F) -> F:
            self._lifespan = function
            return function

        return register

    def __call__(self, message: Message, context: AppContext) -> Any:
        around = self._lifespan
        if around is None:
            return self.handlers[message.metadata.message_type](message, context)
        with contextmanager(around)(context):
            return self.handlers[message.metadata.message_type](message, context)

    def _registered(self, kind: str, action: str, mods: list[Handler] | None) -> Callable[[F], F]:
        def register(function: F) -> F:
            handler: Handler = function
            for mod in reversed([*self.mods, *(mods or [])]):
                handler = _around(mod, handler)
            self.handlers[kind if action == _DEFAULT else f"{kind}.{action}"] = handler
            return function

        return register


class NumPyClient:
    """The base of Flower's older clients."""

    def to_client(self) -> NumPyClient:
        """Itself: the adapter takes either."""
        return self


def _around(mod: Handler, inner: Handler) -> Handler:
    return lambda message, context: mod(message, context, inner)


def _passes(message: Message, context: AppContext, inner: Handler) -> Any:
    """Of mods that only log the size of messages."""
    return inner(message, context)


def _told(level: int, message: str, *values: Any) -> None:
    _log.log(level, message, *values)


_RECORDS = {
    name: getattr(records, name)
    for name in ("Array", "ArrayRecord", "ConfigRecord", "MetricRecord", "RecordDict")
}
_APP = {**_RECORDS, "Message": Message, "Context": AppContext, "Metadata": MessageMetadata}
_CLIENT = {"ClientApp": ClientApp, "NumPyClient": NumPyClient, "Client": NumPyClient}
_MODS = {"message_size_mod": _passes, "arrays_size_mod": _passes}
_COMMON = {**_APP, "log": _told, "NDArrays": list, "Scalar": float}
_NO_SERVER = "the coordinator runs rounds by the job file; keep this import out of the client's file"
_NO_PRIVACY = "privacy is the job's [privacy] table here"
_FLOWER = StandIns(
    "flwr",
    {
        "flwr": {},
        "flwr.app": _APP,
        "flwr.clientapp": {"ClientApp": ClientApp},
        "flwr.clientapp.mod": _MODS,
        "flwr.client": _CLIENT,
        "flwr.client.mod": _MODS,
        "flwr.common": _COMMON,
        "flwr.common.logger": {"log": _told},
        "flwr.common.typing": {"NDArrays": list, "Scalar": float, "Config": dict, "Metrics": dict},
        "flwr.serverapp": {},
        "flwr.serverapp.strategy": {},
        "flwr.server": {},
        "flwr.server.strategy": {},
    },
    {
        "flwr.clientapp.mod": _NO_PRIVACY,
        "flwr.client.mod": _NO_PRIVACY,
        "flwr.serverapp": _NO_SERVER,
        "flwr.server": _NO_SERVER,
    },
    "the adapter knows ClientApp, NumPyClient, Message, Context and their records",
)
flower_stands_in = _FLOWER.placed
"""`with flower_stands_in():` `import flwr` finds the stand-in."""

"""Loads the generated code and makes real gRPC calls over loopback; needs only grpcio and protobuf.

Run by `tools/house.py compat` under the oldest and the newest versions that the metadata allows, with
`sys.path` showing nothing of the package but `roundtable.proto`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import google.protobuf
import grpc

from roundtable.proto import agent_pb2, agent_pb2_grpc, common_pb2, operator_pb2_grpc

BLOB = bytes(range(256)) * 4096


class Echo(agent_pb2_grpc.AgentsServicer):
    """Answers each kind of call: unary, server stream, both streams."""

    def UploadStatus(self, request: Any, context: Any) -> Any:
        return agent_pb2.UploadState(offset=request.offset + 1)

    def Download(self, request: Any, context: Any) -> Iterator[Any]:
        for start in range(request.offset, len(BLOB), 1 << 18):
            yield common_pb2.Chunk(offset=start, data=BLOB[start : start + (1 << 18)])

    def Connect(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for message in requests:
            assert message.WhichOneof("message") == "hello"
            yield agent_pb2.ToAgent(welcome=agent_pb2.Welcome(coordinator=message.hello.metadata["region"]))


def main() -> int:
    """One call of each kind."""
    server = grpc.server(ThreadPoolExecutor(2))
    agent_pb2_grpc.add_AgentsServicer_to_server(Echo(), server)
    operator_pb2_grpc.add_OperatorsServicer_to_server(operator_pb2_grpc.OperatorsServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        agents = agent_pb2_grpc.AgentsStub(channel)
        assert agents.UploadStatus(agent_pb2.UploadHeader(offset=41)).offset == 42
        chunks = list(agents.Download(common_pb2.DownloadRequest(offset=1 << 18)))
        assert b"".join(chunk.data for chunk in chunks) == BLOB[1 << 18 :]
        hello = agent_pb2.FromAgent(hello=agent_pb2.Hello(metadata={"region": "north"}))
        assert [answer.welcome.coordinator for answer in agents.Connect(iter([hello]))] == ["north"]
    server.stop(None).wait()
    print(
        f"protobuf {google.protobuf.__version__} with grpcio {grpc.__version__}: loaded, three calls answered"
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

"""Processes that are forked beside gRPC, as a DataLoader's workers in a script that has joined rounds."""

from __future__ import annotations

import subprocess
import sys

FORKING = """
import os, threading
from concurrent.futures import ThreadPoolExecutor
import roundtable.proto
import grpc

class Echo(grpc.GenericRpcHandler):
    def service(self, details):
        return grpc.unary_unary_rpc_method_handler(lambda request, context: request)

server = grpc.server(ThreadPoolExecutor(2))
server.add_generic_rpc_handlers((Echo(),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
call = grpc.insecure_channel(f"127.0.0.1:{port}").unary_unary("/a/b")
ended = threading.Event()

def talk():
    while not ended.is_set():
        call(b"x")

threads = [threading.Thread(target=talk) for _ in range(2)]
for thread in threads:
    thread.start()
call(b"x")
for _ in range(40):
    if not (child := os.fork()):
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
ended.set()
for thread in threads:
    thread.join()
server.stop(None)
"""


def test_grpc_takes_no_part_in_forks() -> None:
    """Its handlers say so where calls are under way, and abort some of the processes where they are not."""
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "fork" not in done.stderr

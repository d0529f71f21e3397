"""What is said of a task that failed: the task's own line, wherever beneath it the exception rose."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from roundtable.client.failures import WorkFailed, before_batches, diagnose
from roundtable.core.errors import InvalidUpdate, NoExamples, TaskError, TransferError
from roundtable.core.task import load_task

TASK = """
import json
import roundtable as rt
from roundtable.aggregation.rows.gram import gram
from roundtable.client.training.metrics import loss_of

class Ward(rt.Task):
    def model(self): ...
    def data(self, site): ...
    def loss(self, model, batch):
        return {call}
"""


@pytest.mark.parametrize("call", ["gram(None)", "loss_of(None)", "json.loads('Jane Doe')"])
def test_the_line_that_is_named_is_the_tasks_own(call: str, tmp_path: Path) -> None:
    (tmp_path / "ward.py").write_text(TASK.replace("{call}", call))
    loss: Callable[..., object] = load_task("ward.py", tmp_path).loss  # type: ignore[union-attr]
    with pytest.raises(Exception) as caught:
        loss(None, None)
    diagnosis = diagnose(caught.value)
    assert "in ward.py, line 11, in loss()" in diagnosis.detail
    assert "Jane" not in diagnosis.detail
    assert "Jane" in diagnosis.trace or "json" not in call


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("int('Jane Doe')", "ValueError (ward.py, line 1, in <module>)"),
        (
            "import roundtable as rt\nclass Ward(rt.Task):\n    def __init__(self): int('Jane Doe')",
            "ValueError (ward.py, line 3",
        ),
        ("import jane_doe", "ModuleNotFoundError: No module named 'jane_doe'"),
        ("Jane Doe", "SyntaxError: invalid syntax (ward.py, line 1)"),
    ],
)
def test_words_of_a_task_that_does_not_load_stay_at_the_silo(code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "ward.py").write_text(code)
    with pytest.raises(TaskError) as caught:
        load_task("ward.py:Ward", tmp_path)
    diagnosis = diagnose(caught.value)
    assert told in diagnosis.detail
    assert "Jane" not in diagnosis.detail
    assert "Jane" in diagnosis.trace or "jane" in diagnosis.trace


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
            "task_error",
        ),
        ("CUDA error: uncorrectable ECC error encountered", "gpu_error"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "gpu_error"),
        ("NVRM: Xid (PCI:0000:3b:00): 48, pid=1, Double Bit ECC Error", "gpu_error"),
        ("CUDA error: an illegal memory access was encountered", "gpu_error"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "out_of_memory"),
        ("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`", "gpu_error"),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM", "task_error"),
        ("CUDA error: no kernel image is available for execution on the device", "protocol_violation"),
        (
            "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)",
            "gpu_error",
        ),
        ("NCCL error in: x.cpp:1, remote process exited or there was a network error", "node_failure"),
        ("ncclInvalidUsage: ... Duplicate GPU detected : rank 0 and rank 1", "protocol_violation"),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "out_of_memory"),
        (
            "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79 GiB",
            "out_of_memory",
        ),
        ("Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY", "out_of_memory"),
        ("RESOURCE_EXHAUSTED: Failed to allocate request for 2.00GiB", "out_of_memory"),
        ("DataLoader worker (pid 41) is killed by signal: Killed. ", "out_of_memory"),
        (
            "DataLoader worker (pid 41) is killed by signal: Bus error. It is possible that dataloader's "
            "workers are out of shared memory. Please try to raise your shared memory limit.",
            "out_of_memory",
        ),
        (
            "A worker process managed by the executor was unexpectedly terminated. This could be caused by a "
            "segmentation fault while calling the function or by an excessive memory usage causing the "
            "Operating System to kill the worker.\nThe exit codes of the workers are {SIGKILL(-9)}",
            "out_of_memory",
        ),
        ("DataLoader worker (pid 41) is killed by signal: Segmentation fault. ", "task_error"),
        ("The size of tensor a (3) must match the size of tensor b (4)", "task_error"),
    ],
)
def test_a_devices_text_says_whose_fault_it_is(text: str, kind: str) -> None:
    assert diagnose(RuntimeError(text)).kind == kind
    # A text that merely quotes such words is a mistake of the task's.
    assert diagnose(ValueError(text)).kind == "task_error"


LACKS = {
    "at import": "raise MemoryError('8 GB for Jane Doe')",
    "as its object is made": "class Ward(rt.Task):\n    def __init__(self): raise MemoryError",
    "by the system": "import errno\nraise OSError(errno.ENOMEM, 'Cannot allocate memory')",
    "in a library's words": "raise ImportError('x.so: failed to map segment: Cannot allocate memory')",
    "on a device": "raise RuntimeError('CUDA out of memory. Tried to allocate 2.00 GiB')",
    "behind another": "try:\n    raise MemoryError\nexcept MemoryError:\n    raise ValueError('Jane Doe')",
    "in a process of its own": "import subprocess\nsubprocess.run(['sh', '-c', 'kill -9 $$'], check=True)",
}


@pytest.mark.parametrize("code", LACKS.values(), ids=LACKS)
def test_memory_that_is_lacking_while_a_task_loads_is_the_silos_lack(code: str, tmp_path: Path) -> None:
    (tmp_path / "ward.py").write_text(f"import roundtable as rt\n{code}\n")
    with pytest.raises(TaskError) as caught:
        load_task("ward.py:Ward", tmp_path)
    found = diagnose(caught.value, begun=False)
    assert (found.kind, found.whole) == ("out_of_memory", True)
    assert "task 'ward.py:Ward'" in found.detail
    assert "Jane" not in found.detail
    if "kill" not in code:
        assert "before a first batch, where no smaller batch_size would help" in found.detail
        assert "a smaller batch_size needs less" in diagnose(caught.value).detail
    with pytest.raises(WorkFailed, match=r"ran out of memory|was killed") as told, before_batches():
        raise caught.value
    assert told.value.whole
    assert diagnose(told.value).whole


def test_what_is_no_lack_of_memory_stays_what_it_is() -> None:
    mistake = ValueError("out of memory")
    with pytest.raises(ValueError, match="out of memory") as caught, before_batches():
        raise mistake
    assert caught.value is mistake
    for error in (NoExamples("none"), InvalidUpdate("norm", "too long"), TransferError("cut off")):
        kind = diagnose(error).kind
        error.__cause__ = MemoryError()
        assert diagnose(error).kind == kind
    settled = TaskError("a file is missing")
    settled.__context__, settled.__suppress_context__ = MemoryError(), True
    assert diagnose(settled).kind == "task_error", "from None: it has nothing to do with it"
    looped, other = TaskError("one"), ValueError("two")
    looped.__cause__, other.__cause__ = other, looped
    assert diagnose(looped).kind == "task_error"

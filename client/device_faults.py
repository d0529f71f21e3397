"""What an accelerator's libraries say when something fails, and whose fault it is.

The texts are those of the libraries' own tables: CUDA Runtime API, cudaError; cuBLAS, cublasStatus_t;
cuDNN, cudnnStatus_t; NCCL, ncclResult_t, in the sentences that PyTorch prints for them
(torch/csrc/distributed/c10d/NCCLUtils.hpp). A device is left out only for what its hardware did: an assertion
in a kernel is an index of the task's that is out of range, and the same on every other device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFault:
    """A text, the kind of failure that it shows (one of FAILURE_KINDS), its meaning and its source."""

    pattern: re.Pattern[str]
    kind: str
    meaning: str
    source: str


def _fault(pattern: str, kind: str, meaning: str, source: str) -> DeviceFault:
    return DeviceFault(re.compile(pattern, re.IGNORECASE), kind, meaning, source)


LACKING = "the training process ran out of memory; a smaller batch_size needs less"
_CHILD = (
    "a process that the task had started was killed, by somebody or by the kernel for want of memory; fewer "
    "workers (num_workers) and a smaller batch_size need less"
)
_INDEX = (
    "an assertion failed in a kernel, as a rule for a label or index that is out of range; on the CPU, or "
    "with CUDA_LAUNCH_BLOCKING=1, the line that did it is named"
)
_DRIVER = "the GPU's driver and this PyTorch do not fit together; install the build that fits the driver"
_HARDWARE = "the GPU's hardware reported an error; look at `nvidia-smi -q` and the kernel's log for its Xid"
_KERNEL = "a kernel failed on the GPU"
_NETWORK = "a rank lost contact with the others"

# The first that matches counts: the precise ones come before what they contain.
DEVICE_FAULTS = (
    _fault(r"device-side assert", "task_error", _INDEX, "cudaErrorAssert (710)"),
    _fault(
        r"uncorrectable (ECC|NVLink) error", "gpu_error", _HARDWARE, "cudaErrorECCUncorrectable (214), 220"
    ),
    _fault(
        r"hardware stack error|GPU has fallen off",
        "gpu_error",
        _HARDWARE,
        "cudaErrorHardwareStackError (714)",
    ),
    _fault(
        r"\bXid\b.{0,80}\b(48|63|64|74|79|92|94|95|119|120)\b",
        "gpu_error",
        _HARDWARE,
        "NVIDIA's Xid catalogue: 48, 63, 64, 92, 94, 95 memory, 74 NVLink, 79 off the bus, 119, 120 GSP",
    ),
    _fault(
        r"out of shared memory|shared memory object .{0,300}No space left",
        "out_of_memory",
        "shared memory for the processes that read data ran out; give more (--shm-size of a container), or "
        "lower num_workers",
        "torch/csrc/DataLoader.cpp, shm_open(3)",
    ),
    _fault(
        r"out of memory|(can't|cannot) allocate memory|not enough memory|std::bad_alloc",
        "out_of_memory",
        LACKING,
        "cudaErrorMemoryAllocation (2), ENOMEM (12), c10's CPU allocator, C++'s [bad.alloc]",
    ),
    _fault(
        r"CUDA_ERROR_OUT_OF_MEMORY|(cuda|hip)Error(MemoryAllocation|OutOfMemory)|RESOURCE_EXHAUSTED|"
        r"OOM when allocating",
        "out_of_memory",
        LACKING,
        "CUDA Driver API, CUresult (2), hipError_t (2), XLA's status codes, TensorFlow's allocator",
    ),
    _fault(
        r"killed by signal: Killed|SIGKILL\(-9\)",
        "out_of_memory",
        _CHILD,
        "torch/csrc/DataLoader.cpp, loky's TerminatedWorkerError",
    ),
    _fault(
        r"(CUBLAS|CUDNN|CUSOLVER|CUSPARSE|CUFFT)_(STATUS_)?(INTERNAL_ERROR_HOST_)?ALLOC(ATION)?_FAILED",
        "out_of_memory",
        LACKING,
        "cublasStatus_t (3), cudnnStatus_t",
    ),
    _fault(
        r"CU(BLAS|DNN)_STATUS_NOT_INITIALIZED",
        "out_of_memory",
        f"the library's workspace could not be made: {LACKING}",
        "cublasStatus_t (1)",
    ),
    _fault(
        r"driver version is insufficient|no kernel image is available|unsupported display driver|"
        r"invalid device ordinal|no CUDA-capable device",
        "protocol_violation",
        _DRIVER,
        "cudaErrorInsufficientDriver (35), 100, 101, 209, 803",
    ),
    _fault(
        r"Duplicate GPU detected",
        "protocol_violation",
        "two ranks were given the same GPU; start one rank for each device",
        "ncclInvalidUsage (5)",
    ),
    _fault(
        r"CU(BLAS|DNN)_STATUS_(INVALID_VALUE|BAD_PARAM|NOT_SUPPORTED)|ncclInvalid(Argument|Usage)|"
        r"invalid (argument|usage) \(run with NCCL_DEBUG",
        "task_error",
        "an operation was asked for with shapes, types or devices that do not fit",
        "cublasStatus_t (7), cudnnStatus_t, ncclResult_t (4, 5)",
    ),
    _fault(
        r"ncclRemoteError|remote process exited|ncclSystemError|unhandled system error|ncclInternalError",
        "node_failure",
        _NETWORK,
        "ncclResult_t (2, 3, 6)",
    ),
    _fault(
        r"CUDA error|unhandled cuda error|ncclUnhandledCudaError|CU(BLAS|DNN)_STATUS_\w+|cuDNN error",
        "gpu_error",
        _KERNEL,
        "cudaError, ncclResult_t (1)",
    ),
    _fault(
        r"Watchdog caught collective operation timeout|NCCL", "node_failure", _NETWORK, "ProcessGroupNCCL"
    ),
)


def killed(status: int) -> DeviceFault | None:
    """What the end of a process that a task had started shows: SIGKILL's status, or a shell's for it."""
    return device_fault("SIGKILL(-9)") if status in (-9, 137) else None


def device_fault(text: str) -> DeviceFault | None:
    """The first of DEVICE_FAULTS that an error's text shows; None where it shows none."""
    return next((fault for fault in DEVICE_FAULTS if fault.pattern.search(text)), None)

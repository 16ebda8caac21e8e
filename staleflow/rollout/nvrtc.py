"""Kernels in CUDA C++, compiled when first used by the compiler in CUDA's runtime (NVRTC), which PyTorch brings along.

No other compiler is needed, and nothing is built when the package is installed. ::

    module = load(compiled("chain.cu", text, (("ROWS", "32"),)))
    launch(function(module, b"product_out", 73_728), 96, 160, 73_728, arguments, CHAINED)
"""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

CAPABILITY = (9, 0)
"""Of the GPUs for which there are such kernels: H100 and H200."""
SHARED_MEMORY = 232_448
"""Bytes of shared memory that a block may have there: 227 KiB."""


def supported(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


def text_of(*names: str) -> str:
    """The sources beside this file, one after the other."""
    return "\n".join((Path(__file__).parent / f"{name}.cu").read_text() for name in names)


@cache
def compiled(name: str, text: str, options: tuple[tuple[str, str], ...]) -> bytes:
    """Machine code for compute capability 9.0. ``options``: macros and their values."""
    rtc = ctypes.CDLL(f"libnvrtc.so.{(torch.version.cuda or '12').split('.')[0]}")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    rtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    flags = ["--gpu-architecture=sm_90a", "--std=c++17", *(f"-D{macro}={value}" for macro, value in options)]
    failed = rtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*map(str.encode, flags)))
    if failed:
        rtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        rtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{name} does not compile: {log.value.decode()}")
    rtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetCUBIN(program, code)
    rtc.nvrtcDestroyProgram(ctypes.byref(program))
    return code.raw


def load(code: bytes) -> ctypes.c_void_p:
    module = ctypes.c_void_p()
    torch.cuda.current_stream()  # the context of the device exists from here on
    checked(driver().cuModuleLoadData(ctypes.byref(module), code))
    return module


MOST_SHARED, LARGE_CLUSTERS = 8, 14
"""Attributes of a kernel: the most shared memory it is launched with; clusters may have 16 blocks instead of 8."""


def function(module: ctypes.c_void_p, name: bytes, shared_memory: int) -> ctypes.c_void_p:
    found = ctypes.c_void_p()
    checked(driver().cuModuleGetFunction(ctypes.byref(found), module, name))
    checked(driver().cuFuncSetAttribute(found, MOST_SHARED, shared_memory))
    checked(driver().cuFuncSetAttribute(found, LARGE_CLUSTERS, 1))
    return found


class _Value(ctypes.Union):
    _fields_ = (("flag", ctypes.c_int), ("room", ctypes.c_char * 64))


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", _Value))


class _Launch(ctypes.Structure):
    _fields_ = (
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


COOPERATIVE, CHAINED = 2, 6
"""Attributes of a launch: all blocks are on the GPU at once; it may begin before the launch before it has ended."""


def launch(
    kernel: ctypes.c_void_p,
    blocks: int,
    threads: int,
    shared_memory: int,
    arguments: Sequence[Any],
    attribute: int,
) -> None:
    """On PyTorch's current stream. ``arguments``: of ctypes, copied before this returns."""
    attributes = (_Attribute * 1)(_Attribute(attribute, b"", _Value(flag=1)))
    stream = torch.cuda.current_stream().cuda_stream
    how = _Launch(blocks, 1, 1, threads, 1, 1, shared_memory, stream, attributes, 1)
    pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
    checked(driver().cuLaunchKernelEx(ctypes.byref(how), kernel, pointers, None))


@cache
def driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def checked(result: int) -> None:
    if result:
        message = ctypes.c_char_p()
        driver().cuGetErrorString(result, ctypes.byref(message))
        raise RuntimeError(f"CUDA: {(message.value or b'unknown error').decode()}")

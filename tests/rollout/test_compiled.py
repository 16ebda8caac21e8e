"""Kernels compile for the GPUs that they are for, on any machine: NVIDIA's compilers need no GPU.

What a kernel asks of a multiprocessor is checked too: one that spills registers, or does not fit, is slow or cannot be
launched, and no test of what it computes says so.
"""

import ctypes
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from staleflow.rollout import chain, chain_plan, few
from staleflow.rollout.model_folder import ModelConfig, read_config
from staleflow.rollout.nvrtc import CAPABILITY, SHARED_MEMORY, compiled, text_of
from staleflow.rollout.shapes import write

MODELS = ["smollm-135m", "qwen-0.5b", "qwen-1.5b"]
MULTIPROCESSORS, PAGE = 132, 32
SPILLED = 256
"""Most bytes on a thread's stack in the kernel for few sequences: 216 with 1.5 B and 32 of them, where others win."""


class Usage(NamedTuple):
    registers: int
    """Of a thread."""
    stack: int
    """Bytes of a thread."""
    shared: int
    """Bytes of a block, besides those that a launch asks for."""


Look = Callable[[bytes], dict[str, Usage]]


@pytest.fixture
def usage(tmp_path: Path) -> Look:
    """Reads machine code: what each kernel in it needs."""
    triton = pytest.importorskip("triton", reason="needs make test-kernels")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def look(code: bytes) -> dict[str, Usage]:
        (tmp_path / "kernels.cubin").write_bytes(code)
        command = [str(tool), "-res-usage", str(tmp_path / "kernels.cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)", said)
        return {name: Usage(*map(int, numbers)) for name, *numbers in found}

    return look


@pytest.fixture
def nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's compiler, of a PyTorch for GPUs or of ``make test-kernels``."""
    if torch.version.cuda is not None:
        return
    if importlib.util.find_spec("nvidia") is None:
        pytest.skip("needs make test-kernels")
    import nvidia  # pyright: ignore[reportMissingImports]

    for path in sorted(path for root in nvidia.__path__ for path in Path(root).glob("cu13/lib/libnvrtc*.so.*")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # what is loaded is found by its name
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def config_of(model: str, folder: Path) -> ModelConfig:
    write(model, folder)
    return read_config(folder)


def machine_code(sources: Sequence[str], options: dict[str, str]) -> bytes:
    return compiled("kernels.cu", text_of(*sources), tuple(sorted(options.items())))


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("size", "parted"),
    [
        (chain_plan.ANY_ROWS, False),
        *((size, False) for size in chain_plan.SIZES),
        *((size, True) for size in chain_plan.PARTED_SIZES),
    ],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_chain_compiles_and_fits(model: str, size: int, parted: bool, tmp_path: Path, usage: Look) -> None:
    config = config_of(model, tmp_path)
    attention = size == chain_plan.ANY_ROWS
    sources = chain.ATTENTION if attention else chain.PRODUCTS
    found = usage(machine_code(sources, chain_plan.macros(config, PAGE, size, parted)))
    if attention:
        pieces = [2**at for at in range(chain_plan.LARGEST.bit_length())]
        assert set(found) == {"attend_crowd", *(f"attend_{each}" for each in pieces)}
        if config.geometry[3] == 64:
            assert found["attend_crowd"].registers <= 96, "four blocks of five warps fit, which are counted by fours"
        stages = chain_plan.attention_stages(config, PAGE, few=False)
        asked = [chain_plan.attention_kept(config) + stages * 4 * config.geometry[3] * PAGE]
    else:
        shapes = chain_plan.shapes_of(config, size, parted)
        assert set(found) == {"chain_begin", *(f"product_{name}" for name in shapes)}
        asked = [shape.shared_memory for shape in shapes.values()]
    for kernel in found.values():
        assert kernel.stack == 0
        assert kernel.shared + max(asked) <= SHARED_MEMORY + 1024  # of which CUDA takes 1,024 for itself


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(("rows", "polled"), [(8, True), (16, True), (32, True), (8, False)])
@pytest.mark.parametrize("model", MODELS)
def test_the_kernel_for_few_rows_compiles_and_fits(
    model: str, rows: int, polled: bool, tmp_path: Path, usage: Look
) -> None:
    config = config_of(model, tmp_path)
    if not few.fits(config, torch.bfloat16, PAGE, rows):
        pytest.skip("not for this model")
    options = few.macros(config, PAGE, rows, MULTIPROCESSORS, polled)
    (kernel,) = usage(machine_code(few.SOURCES, options)).values()
    assert kernel.stack <= SPILLED


class _Driver:
    """That of a machine with a GPU, as far as compiling asks."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

        return GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """What Triton compiles where it would launch."""
    triton = pytest.importorskip("triton", reason="needs make test-kernels")
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("nothing is compiled for an interpreter")
    found: list[Any] = []
    run = triton.runtime.JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **rest: Any) -> None:  # noqa: ARG001
        found.append(run(kernel, *arguments, grid=grid, warmup=True, **rest))

    monkeypatch.setattr(triton.runtime.JITFunction, "run", compile_only)
    monkeypatch.setattr(triton.runtime.driver, "_active", _Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return found


def fit(kernels: Sequence[Any], usage: Look) -> bool:
    """Whether what was compiled can be launched, and spills nothing."""
    looked = [usage(each.asm["cubin"]) for each in kernels]
    assert all(each.metadata.shared <= SHARED_MEMORY for each in kernels)
    return bool(looked) and all(one.stack == 0 for found in looked for one in found.values())


def halves(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def floats(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


@pytest.mark.parametrize("model", MODELS)
def test_the_engines_kernels_compile_and_fit(model: str, launched: list[Any], tmp_path: Path, usage: Look) -> None:
    config, rows, width = config_of(model, tmp_path), 64, 16
    from staleflow.rollout import cuda_kernels as kernels

    _, heads, kv_heads, size = config.geometry
    entries, tables = halves(2 * kv_heads, 4 * PAGE, size), torch.zeros(rows, width, dtype=torch.int32)
    lengths, query, x = torch.zeros(rows, dtype=torch.int32), halves(rows, heads, size), halves(rows, config.hidden)
    qkv, turns = halves(rows, heads + 2 * kv_heads, size), (halves(512, size), halves(512, size))
    for sequences in (1, rows):  # contexts in many pieces, or in one
        kernels.attend(query[:sequences], entries, tables[:sequences], lengths[:sequences], PAGE, 0.1)
    kernels.attend_spans(query, entries, torch.zeros(4, 16, dtype=torch.int32), tables.view(-1), PAGE, 0.1)
    for where in (tables, lengths):
        kernels.rotate_and_store(qkv, (None, None), turns, lengths, where, entries, heads, PAGE, 1e-6)
    kernels.rotate_and_store(qkv, (halves(size), halves(size)), turns, lengths, tables, entries, heads, PAGE, 1e-6)
    kernels.add_and_norm(x, x, halves(config.hidden), 1e-6)
    kernels.gate(halves(rows, 2 * config.intermediate))
    uniforms, tokens = torch.zeros(rows, dtype=torch.float64), torch.zeros(rows, dtype=torch.int64)
    kernels.pick(halves(rows, config.vocabulary), floats(rows), uniforms, tokens)
    kernels.move((lengths, lengths), (lengths, lengths))
    assert fit(launched, usage)


@pytest.mark.parametrize("model", MODELS)
def test_the_trainers_kernels_compile_and_fit(model: str, launched: list[Any], tmp_path: Path, usage: Look) -> None:
    config, rows, half = config_of(model, tmp_path), 64, torch.bfloat16
    from staleflow.training import kernels

    _, heads, kv_heads, size = config.geometry
    residual, weight, scaled = floats(rows, config.hidden), floats(config.hidden), halves(rows, config.hidden)
    turns, each = (floats(rows, size // 2), floats(rows, size // 2)), floats(rows)
    for branch in (None, scaled):
        kernels.add_norm(residual, branch, weight, 1e-6, half)
    for gradient in (None, residual):
        kernels.norm_backward(scaled, scaled, each, weight, gradient, floats(kernels.PROGRAMS, config.hidden))
    kernels.rotate(halves(rows, heads + 2 * kv_heads, size), *turns, heads + kv_heads)
    keys = halves(rows, kv_heads, size)
    kernels.rotate_back(halves(rows, heads, size), keys, keys, *turns)
    kernels.swiglu(halves(rows, 2 * config.intermediate))
    kernels.swiglu_backward(halves(rows, 2 * config.intermediate), halves(rows, config.intermediate))
    logits, targets = halves(rows, config.vocabulary), torch.zeros(rows, dtype=torch.int64)
    kernels.log_probs(logits, targets, 0.7)
    for d_entropies in (None, each):
        kernels.log_probs_backward(logits, targets, each, each, each, d_entropies, 0.7)
    assert fit(launched, usage)

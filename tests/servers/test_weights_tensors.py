"""Tensors of every kind through the local parameter server, and what need not be copied."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from staleflow.servers.weights.segments import WeightsError, attach_segment
from staleflow.servers.weights.tensors import CHUNK, DTYPES, same
from tests.servers import weights_store
from tests.servers.weights_store import Server, equal, filled, pulled, random_tensor, zeros

registry = weights_store.registry


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_arrives_bit_by_bit_and_the_slot_is_a_safetensors_file(registry: Path, name: str) -> None:
    tensors = {
        "matrix": random_tensor(1, DTYPES[name], (33, 7)),
        "scalar": random_tensor(2, DTYPES[name], ()),
        "none": random_tensor(3, DTYPES[name], (0, 4)),
        "byte": random_tensor(4, torch.uint8, (3,)),
        "strided": random_tensor(5, DTYPES[name], (6, 4)).t(),
    }
    with Server.create("w", registry=registry) as writer, Server.attach("w", registry=registry) as reader:
        stats = writer.push(5, tensors)
        version, into = pulled(reader, tensors, verify=True)
        assert (version, equal(into, tensors)) == (5, True)
        data = dump(writer)
        assert equal(safetensors.torch.load(data), tensors)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        assert int(header["version"]) == 5
        assert reader.last_pull
        assert header["checksum"] == stats.checksum == reader.last_pull.checksum


def dump(writer: Server) -> bytes:
    memory = attach_segment(writer._store.block.segment(writer._store.block.published.slot))
    assert memory is not None
    return memory[:]


def test_tied_tensors_are_stored_once_and_arrive_under_each_name(registry: Path) -> None:
    shared = torch.randn(50, 4)
    tensors = {"embed": shared, "head": shared, "other": torch.randn(3)}
    with Server.create("w", registry=registry) as writer, Server.attach("w", registry=registry) as reader:
        assert writer.push(0, tensors).copied == 50 * 4 * 4 + 12
        assert safetensors.torch.load(dump(writer)).keys() == {"embed", "other"}
        version, into = pulled(reader, tensors, verify=True)
        assert equal(into, tensors)
        tied = zeros({"embed": shared, "other": tensors["other"]})
        reader.pull({**tied, "head": tied["embed"]})  # tied in the engine too
        assert reader.last_pull
        assert reader.last_pull.copied == 50 * 4 * 4 + 12
        reader.pull({"head": into["head"], "other": into["other"]})  # one of the names is enough
        writer.push(1, {**tensors, "head": shared.clone()})  # equal copies are as good as tied
        with pytest.raises(WeightsError, match=r"'head' and 'embed' were one.*tie them"):
            writer.push(2, {**tensors, "head": shared + 1})
        assert version == 0


def test_half_of_the_weights_is_refused(registry: Path) -> None:
    model = {"up": torch.randn(5), "norm": torch.randn(3)}
    with Server.create("w", registry=registry) as writer:
        writer.push(0, model)
        for into in ({"norm": model["norm"]}, {"up": model["up"]}, {}):
            with pytest.raises(WeightsError, match="of the weights is missing among the engine's: add it"):
                pulled(writer, into)


def test_tensors_that_the_engine_ties_and_the_trainer_does_not_are_refused(registry: Path) -> None:
    with Server.create("w", registry=registry) as writer:
        writer.push(0, filled(0))
        one = torch.zeros(64)
        with pytest.raises(WeightsError, match="'a' and 'b' are one tensor in the engine"):
            writer.pull({"a": one, "b": one, "c": torch.zeros(64)})


def test_pull_writes_into_rows_columns_and_other_dtypes_of_the_engine(registry: Path) -> None:
    source = {"q": torch.randn(8, 6), "k": torch.randn(4, 6), "v": torch.randn(4, 6), "o": torch.randn(5, 3)}
    with Server.create("w", registry=registry) as writer, Server.attach("w", registry=registry) as reader:
        writer.push(0, source)
        qkv, wide = torch.zeros(16, 6), torch.zeros(5, 9, dtype=torch.bfloat16)
        reader.pull({"q": qkv[:8], "k": qkv[8:12], "v": qkv[12:], "o": wide[:, 3:6]}, verify=True)
        assert same(qkv, torch.cat([source["q"], source["k"], source["v"]]))
        assert same(wide[:, 3:6], source["o"].bfloat16())
        assert not wide[:, :3].any()
        transposed = torch.nn.Parameter(torch.zeros(6, 8)).t()
        reader.pull({**zeros(source), "q": transposed}, verify=True)
        assert same(transposed.detach(), source["q"])
        with torch.inference_mode():
            frozen = {name: torch.zeros(tensor.shape, dtype=torch.float16) for name, tensor in source.items()}
        reader.pull(frozen)
        assert same(frozen["q"].clone(), source["q"].half())


@pytest.mark.parametrize("elements", [10, CHUNK // 2, CHUNK + 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, {"a": torch.float16}])
def test_floats_are_cast_once_when_they_are_published(registry: Path, elements: int, dtype: Any) -> None:
    tensors = {"a": torch.randn(elements), "b": torch.randn(3, 4).t(), "n": torch.arange(5)}
    kinds = {"a": dtype, "b": dtype} if isinstance(dtype, torch.dtype) else dtype
    expected = {name: tensor.to(kinds.get(name, tensor.dtype)) for name, tensor in tensors.items()}
    with Server.create("w", registry=registry, dtype=dtype) as writer:
        writer.push(0, tensors)
        assert equal(pulled(writer, expected, verify=True)[1], expected)
        writer.push(1, tensors)
        assert writer.push(2, tensors).copied == expected["b"].nbytes  # strided ones are always copied
        tensors["a"][-1] = 9
        writer.push(3, tensors)
        assert pulled(writer, expected, verify=True)[1]["a"][-1].float() == 9


# What did not change is not copied


def test_frozen_tensors_are_skipped_by_writer_and_reader(registry: Path) -> None:
    size = 4 * 64
    with Server.create("w", registry=registry) as writer, Server.attach("w", registry=registry) as reader:
        into = zeros(filled(0))
        for version in range(5):
            stats = writer.push(version, {**filled(9), "a": filled(version)["a"]})
            reader.pull(into)
            seen = reader.last_pull
            assert seen
            assert (stats.copied, stats.skipped) == ((3 * size, 0) if version < 2 else (size, 2 * size))
            assert (seen.copied, seen.skipped) == ((3 * size, 0) if version < 1 else (size, 2 * size))
            assert equal(into, {**filled(9), "a": filled(version)["a"]})


def test_a_change_far_inside_a_large_tensor_is_copied(registry: Path) -> None:
    tensor = torch.zeros(CHUNK)
    with Server.create("w", registry=registry) as writer:
        into = {"a": torch.ones(CHUNK)}
        for version in range(6):
            tensor[-1 - version] = version + 1
            writer.push(version, {"a": tensor})
            writer.pull(into)
            assert same(into["a"], tensor)


def test_forget_brings_back_what_somebody_else_overwrote(registry: Path) -> None:
    with Server.create("w", registry=registry) as writer:
        writer.push(0, filled(1))
        into = zeros(filled(0))
        writer.pull(into)
        into["b"][3] = 7
        with pytest.raises(WeightsError, match=r"'b' does not have the checksum.*forget\(\)"):
            writer.pull(into, verify=True)
        assert writer.pull(into) == 0  # the error made it forget
        assert equal(into, filled(1))
        into["b"][3] = 7
        writer.pull(into)
        assert into["b"][3] == 7
        writer.forget()
        writer.pull(into)
        assert equal(into, filled(1))


@pytest.mark.parametrize("how", ["other tensors", "data assigned", "transposed"])
def test_an_engine_that_moved_its_tensors_gets_all_of_them(registry: Path, how: str) -> None:
    values = {"a": torch.randn(4, 4)}
    with Server.create("w", registry=registry) as writer:
        writer.push(0, values)
        into = zeros(values)
        writer.pull(into)
        if how == "other tensors":
            into = zeros(values)
        elif how == "data assigned":
            into["a"].data = torch.zeros(4, 4)
        else:
            into["a"].data = into["a"].data.t()
        writer.pull(into)
        assert same(into["a"], values["a"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pull_into_gpu_tensors(registry: Path) -> None:
    tensors = {"a": torch.randn(300, 700), "b": torch.randn(7), "n": torch.arange(9)}
    on_gpu = {name: tensor.cuda() for name, tensor in tensors.items()}
    with Server.create("w", registry=registry, dtype=torch.bfloat16) as writer:
        for version in range(3):
            tensors["a"] += 1
            on_gpu["a"] += 1
            writer.push(version, on_gpu if version == 1 else tensors)
            expected = {name: t.bfloat16() if t.is_floating_point() else t for name, t in tensors.items()}
            into = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in expected.items()}
            into["a"] = torch.zeros(700, 300, dtype=torch.bfloat16, device="cuda").t()
            assert writer.pull(into, version, verify=True) == version
            assert equal({name: tensor.cpu() for name, tensor in into.items()}, expected)
            full = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in tensors.items()}
            writer.pull(full)
            assert same(full["a"].cpu(), expected["a"].float())
        assert writer._reader
        assert all(mapped._pinned for mapped in writer._reader._mapped.values())

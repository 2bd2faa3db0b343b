"""Every launch of the package through Triton's real launchers, down to a driver without a GPU.

The processes of tests/helpers/launch_path.py make them, and tests/helpers/device_rules.py says what a device refuses.
What a device makes of a launch that it takes, only a GPU shows.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from tests.helpers.compilers import SOAKED, TARGETS, TRITON_36, Target
from tests.helpers.cubin import CubinKernel
from tests.helpers.device_rules import (
    Argument,
    Launch,
    TensorMap,
    argument_violations,
    launch_violations,
    tensor_map_violations,
)
from tests.helpers.fake_driver import NUM_SMS, SHARED_BYTES
from tests.helpers.problems import GATHERS, OPS
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)

PYTHON_H = Path(sysconfig.get_paths()["include"], "Python.h")

Cases = dict[str, dict[str, Any]]  # by name


def run(folder: Path, target: Target, *what: str, cache: Path | None = None, timeout_s: float = 600) -> list[Any]:
    """What a process of tests/helpers/launch_path.py prints. It compiles the driver, and Triton its launchers."""
    if shutil.which("cc") is None or not PYTHON_H.exists():
        pytest.skip(f"a launch needs a C compiler, cc, and {PYTHON_H}")
    if not target.is_there():
        pytest.skip(f"{TRITON_36} does not exist: make test-all installs Triton 3.6 there")
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache or folder / "cache"), "TRITON_DEFAULT_FP_FUSION": "1"}
    env.pop("TRITON_INTERPRET", None)
    if target.triton == "3.6":
        env["PYTHONPATH"] = os.pathsep.join([str(TRITON_36), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "tests.helpers.launch_path", str(folder), str(target.arch), *what]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


TENSOR_MAP = TensorMap(9, 0x1000, (64, 8), (128,), (64, 4), (1, 1), 0, 3)  # bfloat16 [8, 64]
TENSORS = [(0x1000, 0x1400)]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"address": 0x1008}, "tensor map address: it must be a multiple of 16"),
        ({"address": 0x1400}, "tensor map address: it must lie in a tensor"),
        ({"dims": (64, 9)}, "tensor map address: it must lie in a tensor"),
        ({"dims": (0, 8)}, "tensor map dims"),
        ({"dims": (64, 2**32 + 1)}, "tensor map dims"),
        ({"dims": (), "strides": (), "element_strides": ()}, "tensor map rank"),
        ({"strides": (136,)}, "tensor map strides: they must"),
        ({"strides": (112,)}, "tensor map strides: what they step over"),
        ({"strides": (2**40,)}, "tensor map strides: they must"),
        ({"box": (512, 4), "swizzle": 0}, "tensor map box: its sizes"),
        ({"box": (64, 0)}, "tensor map box: its sizes"),
        ({"box": (4, 4), "swizzle": 0}, "tensor map box: a row must be"),
        ({"box": (128, 4)}, "tensor map swizzle: a row"),
        ({"swizzle": 4}, "tensor map swizzle: it must be below"),
        ({"element_strides": (1, 9)}, "tensor map element strides"),
        ({"interleave": 1}, "tensor map interleave"),
        ({"data_type": 99}, "tensor map data type"),
    ],
)
def test_a_wrong_tensor_map_breaks_its_rule(change: dict[str, Any], rule: str) -> None:
    assert not list(tensor_map_violations(TENSOR_MAP, 90, TENSORS))
    found = list(tensor_map_violations(dataclasses.replace(TENSOR_MAP, **change), 90, TENSORS))
    assert any(text.startswith(rule) for text in found), found


def test_before_hopper_there_are_no_tensor_maps() -> None:
    (found,) = tensor_map_violations(TENSOR_MAP, 80, TENSORS)
    assert found.startswith("tensor map: the device must be sm_90")


KERNEL = CubinKernel("kernel", (8, 4), registers=200, static_shared=0, threads=256, required=True)
LAUNCH = Launch(KERNEL, (132, 1, 1), (256, 1, 1), 4096, 8192, 0, (), (bytes.fromhex("0010000000000000"), bytes(4)))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"grid": (0, 1, 1)}, "grid"),
        ({"grid": (2**31, 1, 1)}, "grid"),
        ({"grid": (1, 65536, 1)}, "grid"),
        ({"block": (128, 1, 1)}, "block: it must have"),
        ({"block": (2048, 1, 1)}, "block: it must be whole warps"),
        ({"kernel": dataclasses.replace(KERNEL, registers=255, threads=512), "block": (512, 1, 1)}, "registers"),
        ({"shared": 8193}, "dynamic shared memory"),
        ({"attributes": (2,)}, "launch attributes"),  # a cooperative grid
    ],
)
def test_a_wrong_launch_breaks_its_rule(change: dict[str, Any], rule: str) -> None:
    assert not list(launch_violations(LAUNCH))
    found = list(launch_violations(dataclasses.replace(LAUNCH, **change)))
    assert any(text.startswith(rule) for text in found), found


POINTER = Argument("x", 8, (0x1000).to_bytes(8, "little"), is_pointer=True)
COUNT = Argument("count", 4, bytes(4))


@pytest.mark.parametrize(
    ("arguments", "tensors", "rule"),
    [
        ([POINTER], TENSORS, "arguments: the cubin takes sizes"),
        ([COUNT, POINTER], TENSORS, "arguments: the cubin takes sizes"),
        ([POINTER, dataclasses.replace(COUNT, data=b"\1\0\0\0")], TENSORS, "argument count"),
        ([POINTER, COUNT], [(0x1001, 0x1400)], "pointer x"),
        ([POINTER, COUNT], [], "pointer x"),
    ],
)
def test_wrong_arguments_break_their_rule(arguments: list[Argument], tensors: list[Any], rule: str) -> None:
    assert not list(argument_violations(LAUNCH, [POINTER, COUNT], TENSORS))
    (found,) = argument_violations(LAUNCH, arguments, tensors)
    assert found.startswith(rule)


PLANTED = {
    "stride": "tensor map strides",
    "address": "tensor map address: it must be a multiple of 16",
    "end": "tensor map address: it must lie in a tensor",
    "box": "tensor map box: its sizes",
    "swizzle": "tensor map swizzle: a row",
    "grid": "grid: push_matmul_kernel must reach the device once, did 0 times",
    "block": "block: it must have",
    "cluster": "launch attributes",
    "shared": "dynamic shared memory",
    "pointer": "pointer segments_ptr: it must lie in a tensor",
}


def test_planted_defects_are_refused(tmp_path: Path) -> None:
    """They go through the package and Triton's launcher: a refusal of the driver comes back as its error."""
    found = {case["case"]: case for case in run(tmp_path, Target("installed", 90), "planted")}
    intact = found.pop("nothing")
    assert intact["refused"] is None and intact["tensor_maps"] == 2 and len(intact["launches"]) == 1
    assert found.keys() == PLANTED.keys()
    for name, case in found.items():
        assert PLANTED[name] in str(case["refused"]), case


def test_every_kernel_is_taken(compiled: Compiled, folder: Path, target: Target) -> None:
    """Every layout, dtype, tile and way to load: the launches whose code tests/kernels/test_compile_only.py reads."""
    cases = run(folder, target, "kernels", cache=folder / "cache")
    assert not [case for case in cases if case["refused"]]
    assert {case["case"] for case in cases} >= compiled.keys()
    assert all(case["triton"].startswith("3.6.") == (target.triton == "3.6") for case in cases)
    by_tma = {case["case"] for case in cases if case["tensor_maps"]}
    assert bool(by_tma) == (target.arch >= 90)
    for case in cases:
        (launch,) = case["launches"]
        assert launch["grid"] <= NUM_SMS, case
        assert launch["shared"] <= SHARED_BYTES[target.arch], case
        if case["case"] in compiled:  # a cubin that another launch has had is listed once
            assert compiled[case["case"]]["kernel"] == launch["kernel"]


GROUP_SIZE = 4


def sequence(case: dict[str, Any]) -> list[str]:
    """The kernels that one round of a call launches, in order."""
    op, fused, num_ws, extra = case["op"], case["algorithm"] == "fused", case["num_ws"], case["by_product"]
    send = ["begin_push", *["signal"] * GROUP_SIZE]
    push, pack = (["push_matmul"], ["pack"]) if fused else (send, send)
    if op == "matmul_all_to_all":
        return [*push, "unpack"]
    if op == "matmul_reduce_scatter":
        return [*push, "reduce"]
    if op == "matmul_all_reduce":
        return [*push, "reduce", *pack, "unpack"]
    if fused:
        return [*pack, *["gather_matmul"] * num_ws, *["unpack"] * extra]
    # One matmul takes all chunks of few rows, and those of K in 16 bits: then the gathered x alone is filled.
    at_once = "ragged" in case["case"] or (op == "all_to_all_matmul" and case["dtype"] != "float32")
    return [*pack, *["wait_source"] * (GROUP_SIZE - 1), *["finish"] * (1 if at_once else num_ws + extra)]


@pytest.mark.thorough
def test_calls_launch_what_they_must(tmp_path: Path) -> None:
    """The public functions, in one round and in several; sends are on the side stream where waits stand beside them."""
    cases = run(tmp_path, Target("installed", 90), "ops", "few", "bfloat16", "float32")
    assert len(cases) == 2 * 2 * (2 * 5 + 2 * 2)
    for case in cases:
        assert case["refused"] is None, case
        kernels = [launch["kernel"].removesuffix("_kernel") for launch in case["launches"]]
        num_rounds = case["epochs"] // (2 if case["op"] == "matmul_all_reduce" else 1)
        assert num_rounds >= (2 if "aligned" in case["case"] else 1)
        assert kernels == num_rounds * sequence(case), case
        beside = {"begin_push", "signal"} | ({"pack"} if case["op"] in GATHERS else set())
        for kernel, launch in zip(kernels, case["launches"], strict=True):
            assert (launch["stream"] != 0) == (kernel in beside), case


@pytest.mark.thorough
def test_parts_of_tensors_are_taken(tmp_path: Path) -> None:
    """An odd stride or address is loaded by pointer; a descriptor has the strides that it needs."""
    cases = {case["case"]: case for case in run(tmp_path, Target("installed", 90), "views")}
    assert not [case for case in cases.values() if case["refused"]]
    by_tma = {name for name, case in cases.items() if case["tensor_maps"]}
    of_w = {f"gather, {x}" for x in ("a row of a wider x", "x behind an odd address")}
    assert by_tma == {"push, a row of a wider x", "push, columns of a wider w", "gather, columns of a wider w", *of_w}


@pytest.mark.soak
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("target", [*TARGETS, *SOAKED], ids=str)
def test_every_problem_of_every_op_is_taken(target: Target, dtype: str, tmp_path: Path) -> None:
    cases = run(tmp_path, target, "ops", "all", dtype, timeout_s=3000)
    assert not [case for case in cases if case["refused"]]
    assert {case["op"] for case in cases} == set(OPS)


MOST_RATIO = 40.0  # to an empty kernel's launch


@pytest.mark.thorough
def test_a_launch_costs_the_host_what_it_did(tmp_path: Path) -> None:
    (found,) = run(tmp_path, Target("installed", 90), "time")
    print(found)
    assert all(ratio <= MOST_RATIO for ratio in found["ratio"].values()), found

"""Every launch of the package through Triton's real launchers, down to a driver without a GPU.

The processes of tests/helpers/launch_path.py make them, and tests/helpers/device_rules.py says what a device refuses.
What a device makes of a launch that it takes, only a GPU shows.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from tests.helpers import compile_only
from tests.helpers import device_rules as rules
from tests.helpers.compilers import TARGETS, TRITON_36, Compilers, Target
from tests.helpers.cubin import CubinKernel
from tests.helpers.fake_driver import NUM_SMS, SHARED_BYTES
from tests.helpers.problems import OPS
from tests.kernels.conftest import Compiled

pytestmark = pytest.mark.timeout(900)

PYTHON_H = Path(sysconfig.get_paths()["include"], "Python.h")

Cases = dict[str, dict[str, Any]]  # by name


def run(compilers: Compilers, target: Target, *suites: str, timeout_s: float = 600) -> list[Any]:
    """Lines of a process of tests/helpers/launch_path.py, which takes kernels that the session has compiled."""
    if shutil.which("cc") is None or not PYTHON_H.exists():
        pytest.skip(f"a launch needs a C compiler, cc, and {PYTHON_H}")
    if not target.is_there():
        pytest.skip(f"{TRITON_36} does not exist: CI installs Triton 3.6 there")
    folder = compilers.folder(target)
    command = [sys.executable, "-m", "tests.helpers.launch_path", str(folder), str(target.arch), *suites]
    done = subprocess.run(command, env=target.env(folder), capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


TENSOR_MAP = rules.TensorMap(9, 0x1000, (64, 8), (128,), (64, 4), (1, 1), 0, 3)  # bfloat16 [8, 64]
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
    assert not list(rules.tensor_map_violations(TENSOR_MAP, 90, TENSORS))
    found = list(rules.tensor_map_violations(dataclasses.replace(TENSOR_MAP, **change), 90, TENSORS))
    assert any(text.startswith(rule) for text in found), found


def test_before_hopper_there_are_no_tensor_maps() -> None:
    (found,) = rules.tensor_map_violations(TENSOR_MAP, 80, TENSORS)
    assert found.startswith("tensor map: the device must be sm_90")


KERNEL = CubinKernel("kernel", (8, 4), registers=200, static_shared=0, threads=256, required=True)
LAUNCH = rules.Launch(
    KERNEL, (132, 1, 1), (256, 1, 1), 4096, 8192, 0, (), (bytes.fromhex("0010000000000000"), bytes(4))
)


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
    assert not list(rules.launch_violations(LAUNCH))
    found = list(rules.launch_violations(dataclasses.replace(LAUNCH, **change)))
    assert any(text.startswith(rule) for text in found), found


POINTER = rules.Argument("x", 8, (0x1000).to_bytes(8, "little"), is_pointer=True)
COUNT = rules.Argument("count", 4, bytes(4))


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
def test_wrong_arguments_break_their_rule(arguments: list[rules.Argument], tensors: list[Any], rule: str) -> None:
    assert not list(rules.argument_violations(LAUNCH, [POINTER, COUNT], TENSORS))
    (found,) = rules.argument_violations(LAUNCH, arguments, tensors)
    assert found.startswith(rule)


PLANTED = {
    "stride": "strides must be 16-byte aligned",  # Triton's descriptor says so first
    "address": "base must be 16-byte aligned",
    "end": "tensor map address: it must lie in a tensor",
    "box": "tensor map box: its sizes",
    "swizzle": "tensor map swizzle: a row",
    "grid": "grid: push_matmul_kernel must reach the device once, did 0 times",
    "block": "block: it must have",
    "cluster": "launch attributes",
    "shared": "dynamic shared memory",
    "pointer": "pointer segments_ptr: it must lie in a tensor",
    "word": "cuStreamWriteValue64 gave 1",
    "start": "tensor map start of w: it must be a multiple of 16",
}


LAUNCHED = TARGETS[1]  # has tensor maps


@pytest.fixture(scope="module")
def broken(compilers: Compilers) -> dict[str, Cases]:
    cases = run(compilers, LAUNCHED, "planted", "slots")
    return {suite: {case["case"]: case for case in cases if case["suite"] == suite} for suite in ("planted", "slots")}


@pytest.mark.thorough
def test_planted_defects_are_refused(broken: dict[str, Cases]) -> None:
    """They go through the package and Triton's launcher: a refusal of the driver comes back as its error."""
    found = broken["planted"]
    intact = found.pop("nothing")
    assert intact["refused"] is None and intact["tensor_maps"] == 2 and len(intact["launches"]) == 1
    cut_anywhere = found.pop("cut anywhere")
    assert cut_anywhere["refused"] is None and cut_anywhere["tensor_maps"] == 2
    assert found.pop("write")["launches"] == [{"kernel": "write", "stream": ANY}]
    assert found.keys() == PLANTED.keys()
    for name, case in found.items():
        assert PLANTED[name] in str(case["refused"]), case


def test_a_gather_describes_its_slots(broken: dict[str, Cases]) -> None:
    """[2 slots, rows of 4 chunks, K], innermost dim first and strides in bytes; a tile takes a box of one slot."""
    found = broken["slots"]
    intact = found.pop("nothing")
    (slots,) = (each for each in intact["boxes"] if len(each[0]) == 3)
    dims, strides, (box_k, box_rows, box_slots) = slots
    assert dims == [256, 4 * 512, 2] and strides == [2 * 256, compile_only.MetaWorkspace().slot_bytes]
    assert (box_k, box_slots) == (64, 1) and box_rows >= 64
    assert intact["refused"] is None and intact["tensor_maps"] == 2
    assert "tensor map address: it must lie in a tensor" in found["a slot more"]["refused"]
    assert "tensor map strides: what they step over" in found["slots that overlap"]["refused"]


def test_every_kernel_is_taken(compiled: Compiled, compilers: Compilers, target: Target) -> None:
    """Every layout, dtype, tile and way to load: the launches whose code tests/kernels/test_compile_only.py reads."""
    cases = run(compilers, target, "kernels")
    assert not [case for case in cases if case["refused"]]
    assert {case["case"] for case in cases} >= compiled.keys()
    assert all(case["triton"].startswith("3.6.") == (target.triton == "3.6") for case in cases)
    by_tma = {case["case"] for case in cases if case["tensor_maps"]}
    assert bool(by_tma) == (target.arch >= 90)
    for case in cases:
        (launch,) = case["launches"]
        if not case["case"].endswith(" choices"):  # whose programs wait for nobody, and take a block each
            assert launch["grid"] <= NUM_SMS * compile_only.IN_SM.get(launch["kernel"], 1), case
        assert launch["shared"] <= SHARED_BYTES[target.arch], case
        if case["case"] in compiled:  # a cubin that another launch has had is listed once
            assert compiled[case["case"]]["kernel"] == launch["kernel"]


WRITE = rules.Write(2, 0x1008, 7, 0)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"stream": 3}, "stream write: the stream"),
        ({"address": 0x100C}, "stream write: the address"),
        ({"address": 0x1400}, "stream write: the word"),
        ({"flags": 1}, "stream write: the flags"),
    ],
)
def test_a_wrong_write_breaks_its_rule(change: dict[str, Any], rule: str) -> None:
    assert not list(rules.write_violations(WRITE, range(3), TENSORS))
    (found,) = rules.write_violations(dataclasses.replace(WRITE, **change), range(3), TENSORS)
    assert found.startswith(rule)


GROUP_SIZE = 4


def sequence(case: dict[str, Any]) -> list[tuple[str, str]]:
    """What one round of a call launches, or has a stream write, in order, and on which stream."""
    if case["algorithm"] == "fused":
        return fused_sequence(case)
    reads = "main" if rounds_of(case) == 1 else "reads"
    send = [("begin_push", reads), *[("write", "sends")] * GROUP_SIZE]
    wait, unpack, reduce = ("wait_source", reads), ("unpack", reads), ("reduce", reads)
    if case.get("is_uneven"):  # torch copies the chunks
        unpack = ("finish", reads)
    if case["op"] == "matmul_all_to_all":
        return [*send, *[wait] * (GROUP_SIZE - 1), unpack] if case.get("is_uneven") else [*send, unpack]
    if case["op"] == "matmul_reduce_scatter":
        return [*send, reduce]
    if case["op"] == "matmul_all_reduce":
        return [*send, reduce, *send, unpack]
    # One matmul takes all chunks of few rows, and those of K in 16 bits.
    if "ragged" in case["case"] or case["op"] == "all_to_all_matmul":
        return [*send, *[("finish", reads)] * case.get("is_uneven", False), unpack]
    num_results = case["num_ws"] + case["by_product"]
    return [*send, *[("wait_source", "main")] * (GROUP_SIZE - 1), *[("finish", reads)] * num_results]


def fused_sequence(case: dict[str, Any]) -> list[tuple[str, str]]:
    pack, unpack, reduce = ("pack", "main"), ("unpack", "main"), ("reduce", "main")
    few = "ragged" in case["case"] or case["suite"] == "norms"  # cuBLAS multiplies them
    push = pack if few and case["op"] != "matmul_all_to_all" else ("push_matmul", "main")
    if case["op"] == "matmul_all_to_all":
        return [push, unpack]
    if case["op"] == "matmul_reduce_scatter":
        return [push, reduce]
    if case["op"] == "matmul_all_reduce":
        return [push, reduce, pack, unpack]
    if few and case["op"] == "all_gather_matmul":
        return [pack, unpack]
    return [pack, *[("gather_matmul", "main")] * case["num_ws"], *[unpack] * case["by_product"]]


@pytest.fixture(scope="module")
def calls(compilers: Compilers) -> list[dict[str, Any]]:
    return run(compilers, LAUNCHED, "few", "norms", "experts", "uneven", "views")


@pytest.mark.thorough
def test_calls_launch_what_they_must(calls: list[dict[str, Any]]) -> None:
    """The public functions, in one round and in several."""
    cases = [case for case in calls if case["suite"] == "few"]
    assert len(cases) == 2 * (2 * 5 + 2 * 2)
    for case in cases:
        num_rounds = launched_rounds(case)
        assert num_rounds >= (2 if "aligned" in case["case"] else 1)
        assert all(each["early"] for each in case["launches"] if each["kernel"] != "write")


def rounds_of(case: dict[str, Any]) -> int:
    return int(case["epochs"]) // (2 if case["op"] == "matmul_all_reduce" else 1)


def launched_rounds(case: dict[str, Any]) -> int:
    assert case["refused"] is None, case
    streams = {0: "main"} | {int(handle): name for handle, name in case["streams"].items()}
    launches = [(each["kernel"].removesuffix("_kernel"), streams[each["stream"]]) for each in case["launches"]]
    num_rounds = rounds_of(case)
    assert launches == num_rounds * sequence(case), case
    return num_rounds


@pytest.mark.thorough
def test_norms_launch_what_they_must(calls: list[dict[str, Any]]) -> None:
    """At most three launches one_shot, of which cuBLAS has one; two_shot is the all_reduce, and scattered the
    reduce_scatter, whose last kernel norms.
    """
    found = {(case["case"], case["algorithm"]): case for case in calls if case["suite"] == "norms"}
    assert len(found) == 6
    for (way, algorithm), case in found.items():
        assert case["refused"] is None, case
        streams = {0: "main"} | {int(handle): name for handle, name in case["streams"].items()}
        launched = [(each["kernel"].removesuffix("_kernel"), streams[each["stream"]]) for each in case["launches"]]
        if way == "two_shot":
            *before, _ = sequence({**case, "op": "matmul_all_reduce"})
            assert launched == [*before, ("unpack_norm", "main")]
        elif way == "scattered":
            *before, _ = sequence({**case, "op": "matmul_reduce_scatter"})
            assert launched == [*before, ("reduce_norm", "main")]
        elif algorithm == "fused":
            assert launched == [("pack", "main"), ("reduce_norm", "main")]
        else:
            sends = [("begin_push", "main"), *[("write", "sends")] * GROUP_SIZE]
            assert launched == [*sends, ("reduce_norm", "main")]


@pytest.mark.thorough
def test_experts_launch_what_they_must(calls: list[dict[str, Any]]) -> None:
    """On the stream of the call, but for rows that travel beside products. Matmuls load by tensor maps."""
    found = {}
    for case in (each for each in calls if each["suite"] == "experts"):
        names = {0: "", case["sends"]: " beside"}
        assert case["refused"] is None and (case["tensor_maps"] > 0) == ("products" in case["case"]), case
        launches = case["launches"]
        found[case["case"]] = [each["kernel"].removesuffix("_kernel") + names[each["stream"]] for each in launches]
    counted = ["count", "scan", "pack", "unpack", "plan", "shift", "place"]
    assert found == {
        "dispatch": [*counted, "send_rows", "take_rows"],
        "dispatch of products": [
            *counted,
            *("send_rows", "take_rows", "experts_matmul"),
            *("send_rows beside", "take_rows beside", "experts_matmul"),
        ],
        "combine": ["return", "return_rows", "add_rows"],
        "combine of products": ["return", "grouped_matmul", "add_rows"],
        "gradient": ["send_rows", "take_rows"],
    }


@pytest.mark.thorough
def test_calls_with_parts_of_different_sizes_launch_what_they_must(calls: list[dict[str, Any]]) -> None:
    cases = [case for case in calls if case["suite"] == "uneven"]
    assert len(cases) == 6
    assert all(launched_rounds(case) == 1 for case in cases)


@pytest.mark.thorough
def test_parts_of_tensors_are_taken(calls: list[dict[str, Any]]) -> None:
    """An odd stride or address is loaded by pointer; a descriptor has the strides that it needs."""
    cases = [case for case in calls if case["suite"] == "views"]
    assert not [case for case in cases if case["refused"]]
    by_tma = {case["case"] for case in cases if case["tensor_maps"]}
    both = {f"{kernel}, {x}" for kernel in ("push", "gather") for x in ("columns of a wider w", "batches of w apart")}
    assert by_tma == {"push, a row of a wider x", "gather, x behind an odd address", *both}


@pytest.mark.nightly
def test_every_problem_of_every_op_is_taken(compilers: Compilers) -> None:
    cases = run(compilers, Target("installed", 90), "all", timeout_s=850)
    assert not [case for case in cases if case["refused"]]
    assert {case["op"] for case in cases} == set(OPS)

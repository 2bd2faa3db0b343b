"""Protections of results in place on GPUs: what the programs of a push decide, and the heap's memory."""

from __future__ import annotations

from tests.helpers.controls.control import Control

WORKSPACE = "fusedcomm/runtime/workspace.py"
IN_PLACE = "kernels/triton/in_place.py"
DEVICE_RESULTS = "fusedcomm/runtime/device_results.py"

CONTROLS: dict[str, Control] = {
    "all programs of a push go by one decision": Control(
        IN_PLACE,
        '    return tl.atomic_cas(decision, undecided, own, sem="acq_rel", scope="gpu")  # finds what is decided',
        "    return own",
        "tests/kernels/test_push_in_place.py::test_a_post_that_comes_between_two_programs[True]",
    ),
    "a push takes no post of another round": Control(
        IN_PLACE,
        "(stamp == flag_value(round.epoch, round.fingerprint))",
        "(stamp != 0)",
        "tests/kernels/test_push_in_place.py::test_a_post_of_another_call_is_not_used[epoch before]",
    ),
    "a push takes no post of another size": Control(
        IN_PLACE,
        " & (size == num_bytes)",
        "",
        "tests/kernels/test_push_in_place.py::test_a_post_of_another_call_is_not_used[size]",
    ),
    "a decision is of one round": Control(
        IN_PLACE,
        "    tl.store(word(round.segment, LAYOUT.decisions) + dst_rank, 0)\n",
        "",
        "tests/kernels/test_push_in_place.py::test_posted_results_are_written_in_place[rows]",
    ),
    "a mark is of one round": Control(
        IN_PLACE,
        "    return mark == round.epoch",
        "    return mark > 0",
        "tests/kernels/test_push_in_place.py::test_a_post_that_comes_too_late_is_copied_out",
    ),
    "a block stays its stream's": Control(
        DEVICE_RESULTS,
        " and each.stream in (stream, None)]",
        "]",
        "tests/runtime/test_device_results.py::test_a_block_stays_its_stream_s",
    ),
    "a GPU's heap that is retired gives out no block": Control(
        DEVICE_RESULTS,
        " and not self._is_retired:",
        ":",
        "tests/runtime/test_device_results.py::test_a_retired_heap_gives_out_no_block",
    ),
    "a failure that a kernel has found retires the heap": Control(
        WORKSPACE,
        "            self._retire_results()\n        found =",
        "        found =",
        "tests/runtime/test_device_results.py::test_a_failed_call_retires_the_heap",
    ),
    "a GPU's heap is there as long as its tensors": Control(
        DEVICE_RESULTS,
        "        _in_use.add(self)\n",
        "",
        "tests/runtime/test_device_results.py::test_a_heap_that_was_dropped_lives_as_long_as_its_tensors",
    ),
    "results of CUDA graphs are not in the heap": Control(
        "fusedcomm/algorithms/in_place.py",
        " and (is_proof or not is_for_capture(workspace.device))",
        "",
        "tests/algorithms/test_fused_in_place.py::test_other_calls_go_through_the_slots[capture]",
    ),
    "a virtual heap has its blocks back": Control(
        "fusedcomm/testing/virtual.py",
        "            return from_dlpack(to_dlpack(part))",
        "            return part",
        "tests/runtime/test_virtual.py::test_results_of_a_heap_come_in_place_in_every_call",
    ),
    "Dynamo sees no event": Control(
        "fusedcomm/runtime/device_to_host.py",
        "self._has_event:\n            return _outside_graphs(DeviceToHost.wait, self)",
        "False:\n            return _outside_graphs(DeviceToHost.wait, self)",
        "tests/runtime/test_device_to_host.py::"
        "test_compiled_code_waits_in_every_call_and_dynamo_does_not_see_the_event",
    ),
}

"""Every protection, how to switch it off, and a test that fails then.

    python -m tests.helpers.negative_controls [PROTECTION ...]

works on copies of the sources, one protection off in each. tests/package/test_negative_controls.py keeps the list true.

The fault matrix, the random programs and the model of the protocol must find what is off in them too:
tests/helpers/fault_controls.py, tests/helpers/soak_faults.py, PLANTED in tests/protocol/test_model.py (a reset without
a new segment is there alone). What nothing here switches off: the order of memory on GPUs
(tests/kernels/test_ptx_order.py refuses PTX without one), and the order of waiting kernels on a GPU
(fusedcomm/runtime/launch_order.py).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("fusedcomm", "kernels", "tests")
LIMIT_S = 240  # a protection against hangs that is off makes a hang


@dataclass(frozen=True)
class Control:
    file: str
    on: str  # this text stands once in the file
    off: str
    test: str

    def run(self) -> str | None:
        """Why this is no control, or None if the test has failed, and failed as a test and not in another way."""
        with tempfile.TemporaryDirectory(prefix="fusedcomm-control-") as folder:
            copy_sources(Path(folder))
            source = Path(folder, self.file)
            source.write_text(source.read_text().replace(self.on, self.off))
            if source.suffix in (".h", ".cpp"):
                build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace", "--build-temp", "temp"]
                subprocess.run(build, cwd=folder, check=True, capture_output=True)
            code, printed = run_tests(Path(folder), self.test)
        if code == 1 and "ImportError" not in printed:
            return None
        return f"{self.test} must fail without {self.on!r}, got exit code {code}:\n{printed[-2000:]}"


def copy_sources(folder: Path) -> None:
    for each in ROOT.iterdir():
        if each.name in COPIED:
            shutil.copytree(each, folder / each.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif each.name not in (".git", "build"):
            (folder / each.name).symlink_to(each)
    kernels = folder / "fusedcomm" / "kernels"
    kernels.unlink(missing_ok=True)  # some checkouts have one
    kernels.symlink_to(folder / "kernels")  # as package_dir maps it


def run_tests(folder: Path, *tests: str) -> tuple[int | None, str]:
    """pytest's exit code and what it printed; no code if it took too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S * len(tests)
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error)
    return done.returncode, done.stdout


PREPARED_CALLS = "kernels/cpu/prepared_calls.cpp"
TRAINING_CALLS = "kernels/cpu/training_calls.cpp"
WORKSPACE = "fusedcomm/runtime/workspace.py"
POSTS = "fusedcomm/runtime/posts.py"
MEMBER = "fusedcomm/runtime/group_member.py"
MEMBERS = "fusedcomm/runtime/members.py"
ROUNDS = "kernels/triton/rounds.py"
PRIMITIVES = "kernels/triton/primitives.py"

CONTROLS: dict[str, Control] = {
    # values
    "a second slot": Control(
        "fusedcomm/runtime/segment.py",
        "return self.header_bytes + epoch % NUM_SLOTS * slot_bytes",
        "return self.header_bytes",
        "tests/runtime/test_workspace.py::test_many_calls_with_a_late_rank_are_exact[chunked-2-200]",
    ),
    "data before the flag": Control(
        "fusedcomm/algorithms/transport.py",
        "                    for place in self._places(round, dst_rank, out):\n",
        "                    round.signal(dst_rank)\n                    __import__('time').sleep(0.01)\n"
        "                    for place in self._places(round, dst_rank, out):\n",
        "tests/ops/test_all_gather_matmul.py::test_a_list_of_weights_shares_one_gather",
    ),
    "a descriptor of x has x's width as its stride": Control(
        "fusedcomm/algorithms/kernel_launch.py",
        "list(x.shape), [x.shape[1], 1]",
        "list(x.shape), [x.stride(0), 1]",
        "tests/algorithms/test_kernel_launch.py::test_one_row_of_a_wider_tensor_has_a_descriptor",
    ),
    "rows of w that overlap have no descriptor": Control(
        "fusedcomm/algorithms/kernel_launch.py",
        "        and step >= row\n",
        "",
        "tests/algorithms/test_kernel_launch.py::test_rows_that_overlap_have_no_descriptor[False]",
    ),
    "exchanges of uneven shards stay": Control(
        "fusedcomm/compile/graph/normalize.py",
        "        start.meta[UNEVEN] = _uneven(exchange)\n",
        "",
        "tests/compile/test_uneven_shards.py::test_all_ranks_leave_it[True-tokens-2]",
    ),
    "a wait before each read": Control(
        WORKSPACE,
        "        self.workspace.wait(src_rank, self.epoch, self.op, self.fingerprint)",
        "        pass",
        "tests/runtime/test_workspace.py::test_many_calls_with_a_late_rank_are_exact[chunked-2-200]",
    ),
    "the last program of a chunk signals": Control(
        ROUNDS,
        "if before + num_stored == num_parts:",
        "if before >= 0:",
        "tests/kernels/test_push_matmul.py::test_a_chunk_is_signalled_when_all_programs_have_stored_it",
    ),
    "the last program of a round counts it": Control(
        ROUNDS,
        "if arrivals + 1 == tl.num_programs(0):",
        "if arrivals >= 0:",
        "tests/kernels/test_reduce.py::test_every_shape",
    ),
    # more than 32 bits
    "places of a peer have 64 bits": Control(
        PRIMITIVES,
        "    first = tl.cast(span.start, tl.int64) + tl.cast(peer, tl.int64) * span.peer_stride\n",
        "    first = tl.cast(span.start, tl.int64) + peer * span.peer_stride\n",
        "tests/kernels/test_large_slots.py::test_an_unpack_writes_rows_of_three_ranks",
    ),
    "rows of x have 64 bits": Control(
        PRIMITIVES,
        "    return first + tl.cast(run, tl.int64) * span.outer_stride + (i - run * span.inner)\n",
        "    return (first + tl.cast(run, tl.int64) * span.outer_stride + (i - run * span.inner)).to(tl.int32)\n",
        "tests/kernels/test_large_slots.py::test_a_push_reads_rows_where_they_lie",
    ),
    "rows of the result have 64 bits": Control(
        "kernels/triton/gather_matmul.py",
        "store_tile(acc, out_ptr, at * N, mask,",
        "store_tile(acc, out_ptr, at.to(tl.int32) * N, mask,",
        "tests/kernels/test_large_slots.py::test_a_gather_of_rows_reads_a_full_slot",
    ),
    "rows of w have 64 bits": Control(
        "kernels/triton/matmul.py",
        "load_block(w, (k + ks).to(tl.int64), ",
        "load_block(w, k + ks, ",
        "tests/kernels/test_large_indices.py::test_a_push_reads_w_where_it_lies",
    ),
    "columns of a gather's w have 64 bits": Control(
        "kernels/triton/gather_matmul.py",
        "            w_columns = w_columns.to(tl.int64)\n",
        "            pass\n",
        "tests/kernels/test_large_indices.py::test_a_gather_reads_w_where_it_lies",
    ),
    "places of the elements that are reduced have 64 bits": Control(
        "kernels/triton/reduce.py",
        "tl.store(out_ptr + start + first + offsets, rounded",
        "tl.store(out_ptr + (start + first).to(tl.int32) + offsets, rounded",
        "tests/kernels/test_large_slots.py::test_a_reduction_reads_a_full_slot",
    ),
    "32-bit products of kernels are listed": Control(
        "kernels/triton/matmul.py",
        "load_block(w, (k + ks).to(tl.int64), ",
        "load_block(w, k + ks, ",
        "tests/kernels/test_compile_only.py::test_32_bit_products_are_bounded[installed-sm_80]",
    ),
    "a slot's elements are counted in 32 bits": Control(
        "fusedcomm/runtime/segment.py",
        "MOST_SLOT_BYTES = (1 << 32) - (1 << 13)",
        "MOST_SLOT_BYTES = 3 << 31",
        "tests/kernels/test_large_slots.py",
    ),
    "K and N of fused are counted in 32 bits": Control(
        "fusedcomm/algorithms/planner.py",
        "        if size > MOST_INDICES:",
        "        if False:",
        "tests/algorithms/test_planner.py::test_what_a_slot_does_not_bound_is_counted_in_32_bits",
    ),
    "a stride of w fits its descriptor": Control(
        "fusedcomm/algorithms/kernel_launch.py",
        "        and step * w.itemsize < _DESCRIBED_BYTES\n",
        "",
        "tests/algorithms/test_kernel_launch.py::test_strides_of_descriptors_are_below_a_terabyte",
    ),
    # hangs
    "a bound of waits": Control(
        WORKSPACE,
        "        self.timeout_s = env.timeout_s()",
        "        self.timeout_s = 3600.0",
        "tests/runtime/test_faults.py::test_a_peer_that_never_calls[chunked-later-call]",
    ),
    "a bound of waits in kernels": Control(
        WORKSPACE,
        "int(self.timeout_s * 1e9)",
        "int(3600e9)",
        "tests/runtime/test_faults.py::test_a_peer_that_never_calls[fused-later-call]",
    ),
    "a bound of votes": Control(
        "fusedcomm/runtime/vote.py",
        "        self.timeout = env.timeout_s()",
        "        self.timeout = 3600.0",
        "tests/runtime/test_faults.py::test_a_peer_that_never_calls[chunked-first-call]",
    ),
    "a bound of torch's rendezvous on GPUs": Control(
        MEMBER,
        "            if left <= 0:\n",
        "            if False:\n",
        "tests/runtime/test_rendezvous_on_gpus.py::test_a_rendezvous_that_blocks_ends_in_the_vote",
    ),
    "a bound of a store that is cut off": Control(
        "fusedcomm/runtime/vote.py",
        "result.result(max(0.0, self.deadline - time.monotonic()) + STORE_GRACE_S)",
        "result.result()",
        "tests/runtime/test_vote.py::test_a_store_that_is_cut_off_ends_the_vote_in_time",
    ),
    "peers are told of a failure": Control(
        WORKSPACE,
        "            self._signal_broken(dst, self.rank, kind, epoch)\n",
        "            if dst == self.rank:\n                self._signal_broken(dst, self.rank, kind, epoch)\n",
        "tests/runtime/test_faults.py::test_a_late_rank_gets_an_error_too",
    ),
    "growth meets before it waits": Control(
        MEMBER,
        "            self._come_together(self.workspace, op, ~fingerprint & FINGERPRINT)\n",
        "",
        "tests/runtime/test_faults.py::test_a_peer_in_another_call[needs-growth-chunked-later-call]",
    ),
    # wrong numbers after a failure
    "calls that differ are told apart": Control(
        WORKSPACE,
        "        if flag != epoch << FINGERPRINT_BITS | fingerprint:",
        "        if flag >> FINGERPRINT_BITS != epoch:",
        "tests/ops/test_peer_faults.py::test_a_peer_with_other_shapes_or_dims",
    ),
    "a round left half way is broken": Control(
        WORKSPACE,
        "        self._give_up(ABANDONED, epoch)",
        "        pass",
        "tests/runtime/test_faults.py::test_a_round_left_half_way_is_never_taken_for_the_next[chunked-at-once]",
    ),
    "a rank that ends tells its peers": Control(
        WORKSPACE,
        "                self._tell_departure(peer, self.rank, last_words, epoch)",
        "                pass",
        "tests/runtime/test_exits.py::test_peers_hear_why_a_rank_has_left[chunked-while-they-wait]",
    ),
    "a rank that ends spoils no round before": Control(
        WORKSPACE,
        "                self._tell_departure(peer, self.rank, last_words, epoch)",
        "                self._tell_departure(peer, self.rank, last_words, epoch - 1)",
        "tests/runtime/test_exits.py::test_a_rank_that_ends_spoils_no_round_before",
    ),
    "a process that is gone is looked for": Control(
        WORKSPACE,
        "            gone = {src for src in range(self.group_size) if self.departures.is_gone(src)}",
        "            gone = set()",
        "tests/runtime/test_exits.py::test_a_process_that_is_gone_is_found",
    ),
    "all are told of a process that is gone": Control(
        WORKSPACE,
        "                for dst in range(self.group_size):\n                    self._tell_departure",
        "                for dst in [self.rank]:\n                    self._tell_departure",
        "tests/runtime/test_exits.py::test_whoever_comes_later_blames_the_process_that_is_gone",
    ),
    "a look at the broken words where all signals are there": Control(
        WORKSPACE,
        '        if self.device.type == "cpu" and self.breakers(epoch):',
        "        if False:",
        "tests/runtime/test_faults.py::test_a_late_rank_gets_an_error_too",
    ),
    "a look at the broken words after the reads of a kernel": Control(
        ROUNDS,
        "    failed = failed | is_broken(round, LAYOUT)\n",
        "",
        "tests/kernels/test_reduce.py::test_a_slot_that_was_given_up_poisons",
    ),
    "a failed rank tells who still reads before it pushes": Control(
        ROUNDS,
        "    give_up_earlier(segments_ptr, rank, LAYOUT)\n",
        "",
        "tests/protocol/test_late_failure.py::test_who_still_reads_is_told",
    ),
    "a forked child is no rank": Control(
        WORKSPACE,
        "        if os.getpid() != self.pid:",
        "        if False:",
        "tests/runtime/test_faults.py::test_a_forked_child_is_no_rank",
    ),
    "a failed vote is not tried again": Control(
        MEMBERS,
        "            if device in group.errors:",
        "            if False:",
        "tests/runtime/test_faults.py::test_a_rank_that_is_late_for_the_first_call_does_not_meet_the_second",
    ),
    "a workspace that could not be made is not tried again": Control(
        MEMBER,
        "        if self.error is not None:",
        "        if False:",
        "tests/runtime/test_faults.py::test_a_peer_that_never_calls[chunked-first-call]",
    ),
    "an error that is kept holds on to nothing": Control(
        MEMBERS,
        "                raise group.errors[device].again() from failed",
        "                raise group.errors[device] from failed",
        "tests/runtime/test_reset.py::test_a_failed_call_keeps_neither_its_group_nor_its_tensors",
    ),
    "a reset makes slots of one size": Control(
        MEMBERS,
        '        yield [(known.members[d], max(fact["slots"][d.type] for fact in facts)) for d in devices]',
        "        yield [(known.members[d], known.members[d].slot_bytes) for d in devices]",
        "tests/runtime/test_reset.py::test_a_reset_makes_slots_of_one_size",
    ),
    "segments of captured graphs are kept": Control(
        MEMBER,
        "            self.retired.append(self.workspace)",
        "            pass",
        "tests/runtime/test_workspace.py::test_retired_segments_are_kept_and_watched",
    ),
    "chunked calls leave a captured workspace": Control(
        MEMBER,
        "        leaves = by_host and self.workspace.captured",
        "        leaves = False",
        "tests/ops/test_captures.py::test_chunked_calls_leave_a_captured_workspace_to_the_graphs",
    ),
    "a round's sends come after the reads of the one before": Control(
        "fusedcomm/algorithms/transport.py",
        "        self.sends.wait_stream(self.reads)\n        if len",
        "        if len",
        "tests/algorithms/test_schedule.py::test_nothing_races[2-chunked]",
    ),
    "the own chunk of a fused gather comes before the matmul that fills the GPU": Control(
        "fusedcomm/algorithms/fused.py",
        "            stream = main if dst_rank == workspace.rank else workspace.side_stream()",
        "            stream = workspace.side_stream()",
        "tests/algorithms/test_schedule.py::test_copies_of_a_fused_gather_do_not_race[2]",
    ),
    "the own chunk of a gather by a kernel is only signalled": Control(
        "kernels/triton/copy.py",
        "        if (step > 0) | OWN:\n            _copy(chunk, tensor, dst_rank",
        "        if True:\n            _copy(chunk, tensor, dst_rank",
        "tests/algorithms/test_fused_gather.py::test_the_own_chunk_does_not_go_through_the_slot",
    ),
    "the own chunk of a gather by copy engines is only signalled": Control(
        "fusedcomm/algorithms/fused.py",
        "            if own or stream is not main:",
        "            if True:",
        "tests/algorithms/test_fused_gather.py::test_the_own_chunk_does_not_go_through_the_slot",
    ),
    "a gather waits for the own signal of a chunk that it leaves out": Control(
        "kernels/triton/gather_matmul.py",
        "            failed = wait_source(rank, next_round(segments_ptr, rank, fingerprint), failed, LAYOUT)\n",
        "            pass\n",
        "tests/kernels/test_own_chunk.py::test_the_own_signal_is_waited_for",
    ),
    "each round takes the staging of the last one": Control(
        "fusedcomm/algorithms/transport.py",
        "            self.copied[dst_rank] = self.sends.record_event()",
        "            pass",
        "tests/algorithms/test_transport.py::test_each_round_takes_the_staging_of_the_last_one",
    ),
    "the callers of chunked come after all of its streams": Control(
        "fusedcomm/algorithms/transport.py",
        "        self.main.wait_stream(self.sends)\n        self.main.wait_stream(self.reads)",
        "        pass",
        "tests/algorithms/test_transport.py::test_every_op_is_right_in_a_random_order",
    ),
    "Ctrl-C in the join of chunked leaves none of its streams running on": Control(
        "fusedcomm/algorithms/transport.py",
        "            self._main_waits()\n            raise",
        "            raise",
        "tests/algorithms/test_transport.py::test_ctrl_c_in_the_join_leaves_both_streams_joined",
    ),
    # prepared calls
    "arguments of a recorded call have storages of their own": Control(
        "fusedcomm/ops/prepared.py",
        "    args, kwargs = pytree.tree_map_only(Tensor, native.alias, (args, kwargs))\n",
        "",
        "tests/ops/test_prepared.py::test_arguments_that_share_a_storage_while_they_are_recorded",
    ),
    "a kind of call has strides": Control(
        "kernels/cpu/prepared_calls.h",
        "    key.append(t.strides().begin(), t.strides().end());\n",
        "",
        "tests/ops/test_prepared.py::test_layouts_of_arguments[chunked]",
    ),
    "a reset drops tapes": Control(
        PREPARED_CALLS,
        "  ++generation_;\n  calls_.clear(dropped);\n",
        "",
        "tests/ops/test_prepared.py::test_what_drops_tapes[reset]",
    ),
    "a tape that was found before a reset is not run": Control(
        PREPARED_CALLS,
        "call.generation != generation_ || ",
        "",
        "tests/ops/test_prepared.py::test_a_tape_that_a_thread_has_found_is_dropped_too",
    ),
    "a tape that was recorded before a reset is not kept": Control(
        PREPARED_CALLS,
        "  if (key.front() != generation_) return;\n",
        "",
        "tests/ops/test_prepared.py::test_a_tape_that_is_recorded_while_others_go_is_dropped",
    ),
    "calls of a group that is gone are not found": Control(
        MEMBERS,
        "            each.prepared.withdraw()",
        "            pass",
        "tests/ops/test_prepared.py::test_a_group_that_is_gone_has_no_calls",
    ),
    "autocast does not reach into a prepared call": Control(
        "kernels/cpu/op_kernels.cpp",
        "    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);",
        "   ",
        "tests/ops/test_prepared.py::test_autocast_does_not_reach_into_a_call[outside-unfused]",
    ),
    "a prepared round that is left half way is broken": Control(
        PREPARED_CALLS,
        "if (!context.is_broken()) with_gil",
        "if (false) with_gil",
        "tests/runtime/test_prepared_faults.py::test_ctrl_c_before_python_has_begun_to_wait",
    ),
    # training calls
    "a kind of training call has what requires grad": Control(
        TRAINING_CALLS,
        "  for (const auto& t : tensors) key.push_back(t.requires_grad());\n",
        "",
        "tests/ops/test_training.py::test_kinds_that_differ_in_what_requires_grad",
    ),
    "what a training call saves is told apart by argument": Control(
        "fusedcomm/ops/formula.py",
        "        args, results = pytree.tree_map_only(Tensor, loaded().alias, (list(args), results))  # x may be w\n",
        "        args = list(args)\n",
        "tests/ops/test_training.py::test_x_that_is_w_in_the_first_call",
    ),
    "a recorded backward tells gradients from what was saved": Control(
        "fusedcomm/ops/formula.py",
        "        saved, grads = pytree.tree_map_only(Tensor, loaded().alias, (saved, grads))\n",
        "",
        "tests/ops/test_training.py::test_gradients_that_are_what_was_saved",
    ),
    "second derivatives are taken in Python": Control(
        TRAINING_CALLS,
        "at::GradMode::is_enabled() || ",
        "",
        "tests/ops/test_training.py::test_a_program_does_the_same_without_tapes[second_derivatives-packed-qkv]",
    ),
    "a backward under autocast has tapes of its own": Control(
        TRAINING_CALLS,
        "  Key key{at::autocast::is_autocast_enabled(at::kCPU) ? ",
        "  Key key{false ? ",
        "tests/ops/test_training.py::test_a_program_does_the_same_without_tapes[autocast_around_the_backward-packed-qkv]",
    ),
    "modes see a backward": Control(
        TRAINING_CALLS,
        "is_enabled() || !no_mode_is_on()) return in_python",
        "is_enabled()) return in_python",
        "tests/ops/test_training.py::test_a_program_does_the_same_without_tapes[under_modes-packed-qkv]",
    ),
    # decisions that all ranks must make alike
    "hosts are voted on": Control(
        "fusedcomm/runtime/topology.py",
        '        if fact["host"] != facts[0]["host"]:',
        "        if False:",
        "tests/runtime/test_workspace.py::test_ranks_on_several_hosts_fall_back_together",
    ),
    "the smallest cap holds for all": Control(
        "fusedcomm/runtime/topology.py",
        'min(fact["workspace_bytes"] for fact in facts)',
        "env.workspace_bytes()",
        "tests/runtime/test_workspace.py::test_settings_that_differ_by_rank",
    ),
    "algorithms that are asked for are voted on": Control(
        "fusedcomm/runtime/topology.py",
        "    if len(set(values)) > 1:",
        "    if False:",
        "tests/runtime/test_workspace.py::test_settings_that_differ_by_rank",
    ),
    "a GPU's kernels are tried before the vote": Control(
        "fusedcomm/runtime/topology.py",
        "_no_triton() or triton_probe.cannot_launch(device)",
        "_no_triton()",
        "tests/runtime/test_triton_probe.py::test_one_rank_whose_kernels_do_not_run_makes_all_unfused",
    ),
    "TF32 settings are voted on": Control(
        "fusedcomm/runtime/topology.py",
        'all(fact["tf32"] for fact in facts)',
        "tf32_allowed()",
        "tests/runtime/test_workspace.py::test_ranks_with_other_tf32_settings_plan_alike",
    ),
    "tuned numbers are voted on": Control(
        "fusedcomm/runtime/topology.py",
        "constants if _all_have_the_same(facts, rank) else None",
        "constants",
        "tests/cost/test_tuned.py::test_tuned_numbers_decide_on_all_ranks_or_on_none",
    ),
    "a rank without memory is heard of": Control(
        MEMBER,
        '"error": error}',
        '"error": ""}',
        "tests/runtime/test_faults.py::test_a_rank_without_memory_makes_all_run_unfused",
    ),
    "votes compare what they are about": Control(
        MEMBER,
        "    if others:\n        calls = ",
        "    if False:\n        calls = ",
        "tests/runtime/test_faults.py::test_reset_against_close_is_a_mismatch",
    ),
    "old posts do not count in a vote": Control(
        "fusedcomm/runtime/vote.py",
        '        elif None not in attempts and all(post and post["seen"] == seen for post in latest):',
        "        elif None not in attempts:",
        "tests/runtime/test_vote.py::test_old_posts_do_not_count",
    ),
    "an algorithm is proved before its use": Control(
        "fusedcomm/ops/dispatch.py",
        "        if proof.is_unproved(plan, record.dtype, ours, uneven):",
        "        if False:",
        "tests/ops/test_proof.py::test_what_fails_its_proof_is_off_for_all_ranks[wrong-packed-qkv]",
    ),
    "a capture loads no kernels": Control(
        "fusedcomm/ops/dispatch.py",
        "        if is_capturing(ours.device) and (kernels, workspace.slot_bytes) not in ours.loaded:",
        "        if False:",
        "tests/ops/test_captures.py::test_a_capture_runs_what_a_call_before_it_has_loaded",
    ),
    "all ranks vote on a proof": Control(
        "fusedcomm/ops/proof.py",
        'first, _, text = min(failed, default=(_WRONG, 0, ""))',
        "first = cause",
        "tests/ops/test_proof.py::test_what_fails_its_proof_is_off_for_all_ranks[wrong-packed-qkv]",
    ),
    "a success that one rank lacks is proved again": Control(
        "fusedcomm/runtime/proof_file.py",
        "if wrong[name] or None not in texts}",
        "}",
        "tests/ops/test_proof.py::test_what_one_rank_has_on_record_holds_only_if_it_is_a_failure",
    ),
    "a proof is bounded": Control(
        "fusedcomm/ops/proof.py",
        "min(BOUND_S, env.timeout_s() / 2)",
        "3600.0",
        "tests/ops/test_proof.py::test_what_fails_its_proof_is_off_for_all_ranks[late-packed-qkv]",
    ),
    # FUSEDCOMM_CHECK=1
    "calls are compared before they begin": Control(
        "fusedcomm/ops/dispatch.py",
        "        if ours.topology.check:",
        "        if False:",
        "tests/ops/test_call_check.py::test_a_difference_is_the_same_error_on_all_ranks",
    ),
    "all ranks check, or none": Control(
        "fusedcomm/runtime/topology.py",
        'any(fact["check"] for fact in facts)',
        "env.check()",
        "tests/ops/test_call_check.py::test_it_is_on_for_all_ranks_if_one_asks",
    ),
    "a look at the guard bytes": Control(
        "fusedcomm/runtime/canaries.py",
        "    wrong = found != _pattern(layout.guard_bytes)\n",
        "    wrong = torch.zeros_like(found, dtype=torch.bool)\n",
        "tests/runtime/test_canaries.py::test_an_overrun_of_a_peer_is_told_to_all_ranks",
    ),
    "a look at the guard bytes of a result": Control(
        "fusedcomm/runtime/canaries.py",
        "return None if posted is None else damage_around(posted, rank)",
        "return None",
        "tests/runtime/test_canaries.py::test_a_write_past_a_result_is_told_to_all_ranks",
    ),
    # at the end of the interpreter
    "the main thread is never held back": Control(
        "kernels/cpu/gil.h",
        " && syscall(SYS_gettid) != getpid()",
        "",
        "tests/runtime/test_process_ends.py::test_ranks_end_without_a_crash[waits_at_the_end]",
    ),
    "a daemon thread is held back": Control(
        "kernels/cpu/gil.h",
        "  while (interpreter_ends() && ",
        "  while (false && ",
        "tests/runtime/test_process_ends.py::test_ranks_end_without_a_crash[thread_waits]",
    ),
    # results in place
    "a post is of this round": Control(
        POSTS,
        "        return bool(loaded().load(address + 2 * _WORD) == stamp)",
        "        found = loaded().load(address + 2 * _WORD)\n"
        "        return bool(found <= stamp and found & 0xFFFFFF == stamp & 0xFFFFFF)",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[False-2]",
    ),
    "a post is of this round in a prepared call too": Control(
        "kernels/cpu/rounds.h",
        "    return load_word(post_of(segments_.rank, peer) + 2 * sizeof(int64_t)) == flag_value();",
        "    const int64_t stamp = load_word(post_of(segments_.rank, peer) + 2 * sizeof(int64_t));\n"
        "    return stamp <= flag_value() && (stamp & 0xFFFFFF) == fingerprint_;",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[True-2]",
    ),
    "a post is of this call in a prepared call too": Control(
        "kernels/cpu/rounds.h",
        "    return load_word(post_of(segments_.rank, peer) + 2 * sizeof(int64_t)) == flag_value();",
        "    const int64_t stamp = load_word(post_of(segments_.rank, peer) + 2 * sizeof(int64_t));\n"
        "    return stamp >> kFingerprintBits == flag_value() >> kFingerprintBits;",
        "tests/ops/test_in_place_faults.py::test_calls_that_differ_write_into_no_result_of_the_other[prepared]",
    ),
    "a post has the size that is written": Control(
        POSTS,
        "        return int(place) if size == num_bytes else None",
        "        return int(place)",
        "tests/ops/test_in_place_faults.py::test_calls_with_one_fingerprint_write_beyond_no_result[python]",
    ),
    "a post has the size that is written in a prepared call too": Control(
        "kernels/cpu/rounds.h",
        "    if (load_word(words + sizeof(int64_t)) != num_bytes) return std::nullopt;\n",
        "",
        "tests/ops/test_in_place_faults.py::test_calls_with_one_fingerprint_write_beyond_no_result[prepared]",
    ),
    "a mark is of this round in a prepared call too": Control(
        "kernels/cpu/rounds.h",
        "load_word(mark(segments_.rank, src_rank)) == *epoch_ + 1;",
        "load_word(mark(segments_.rank, src_rank)) > 0;",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[True-2]",
    ),
    "a post is of this call": Control(
        POSTS,
        "        return bool(loaded().load(address + 2 * _WORD) == stamp)",
        "        return bool(loaded().load(address + 2 * _WORD) >> 24 == stamp >> 24)",
        "tests/ops/test_in_place_faults.py::test_calls_that_differ_write_into_no_result_of_the_other[python]",
    ),
    "a mark is of this round": Control(
        POSTS,
        "self._layout.mark(epoch, src_rank)) == epoch)",
        "self._layout.mark(epoch, src_rank)) > 0)",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[False-2]",
    ),
    "a result that the caller gives is not posted": Control(
        "fusedcomm/algorithms/transport.py",
        "        return out if has_heap and any(out is each for each in self.made) else None",
        "        return out if has_heap else None",
        "tests/ops/test_in_place.py::test_a_result_that_is_given_is_not_posted",
    ),
    "a result that nobody posts takes no block": Control(
        "fusedcomm/algorithms/transport.py",
        "if posted and self.workspace.results is not None:",
        "if self.workspace.results is not None:",
        "tests/ops/test_result_memory.py::test_only_results_that_are_posted_take_blocks[matmul_reduce_scatter-scatter-python]",
    ),
    # parts of different sizes
    "chunks of different sizes lie as far apart as the largest": Control(
        WORKSPACE,
        "step = self.spans.chunk_numel * self.dtype.itemsize",
        "step = numel * self.dtype.itemsize",
        "tests/ops/test_uneven.py::test_values_and_gradients[tokens-7-of-3-chunked]",
    ),
    "a chunk in place lies as the peer's result does": Control(
        "fusedcomm/geometry/spans.py",
        "return self.by_peer[dst_rank].landing if self.by_peer else self.unpack.of(rank)",
        "return self.unpack.of(rank)",
        "tests/ops/test_uneven.py::test_chunks_come_in_place[rows-python]",
    ),
    "the size of a peer's result is the peer's": Control(
        "fusedcomm/geometry/spans.py",
        "return self.by_peer[peer].unpacked_numel if self.by_peer else own",
        "return own",
        "tests/ops/test_uneven.py::test_chunks_come_in_place[rows-python]",
    ),
    "who has which part is part of a call": Control(
        "fusedcomm/geometry/exchange.py",
        "return *self.for_all.key, self.cut.gathered, self.cut.scattered",
        "return self.for_all.key",
        "tests/ops/test_uneven.py::test_ranks_that_disagree_are_told[0]",
    ),
    "what is the own chunk too is multiplied before any chunk": Control(
        "fusedcomm/algorithms/chunk_matmul.py",
        "            if rank in receivers:",
        "            if False:",
        "tests/algorithms/test_chunk_matmul.py::test_shared_chunks_come_in_place_whoever_is_late[pairs-prepared]",
    ),
    "the check compares what only some ranks say": Control(
        "fusedcomm/ops/call_check.py",
        "in max(calls_by_rank, key=len):",
        "in calls_by_rank[rank]:",
        "tests/ops/test_uneven_unfused.py::test_the_check_finds_ranks_that_disagree[matmul_reduce_scatter]",
    ),
    "a call is for the rank that makes it": Control(
        "fusedcomm/ops/dispatch.py",
        "if exchange.cut is not None and exchange.cut.rank != pg.rank():",
        "if False:",
        "tests/ops/test_uneven_graphs.py::test_a_rank_that_is_not_this_one_is_refused",
    ),
    "no block is used again after a failure": Control(
        WORKSPACE,
        "            self.results.retire()",
        "            pass",
        "tests/ops/test_in_place_faults.py::test_a_stopped_peer_writes_into_no_later_tensor[prepared]",
    ),
    # results in symmetric memory
    "a forked child has results of its own": Control(
        "kernels/cpu/heap_memory.h",
        "memory->make_private();",
        "(void)memory;",
        "tests/runtime/test_heap_forks.py::test_a_child_writes_into_memory_of_its_own",
    ),
    "memory is made private once": Control(
        "kernels/cpu/heap_memory.h",
        "  if (private_) return;\n  private_ =",
        "  private_ =",
        "tests/runtime/test_heap_forks.py::test_a_child_of_a_child_keeps_what_the_child_wrote",
    ),
    "a block that a child may read is not used again": Control(
        "kernels/cpu/heap_memory.h",
        "  if (!seen_by_child) return",
        "  return",
        "tests/runtime/test_heap_forks.py::test_a_block_that_a_child_may_read_is_not_used_again",
    ),
    "a child that has gone gives its blocks free": Control(
        "kernels/cpu/forks.h",
        "F_SEAL_WRITE) != 0",
        "F_SEAL_WRITE) != 1",
        "tests/runtime/test_heap_forks.py::test_blocks_that_children_have_seen_are_used_again_when_those_are_gone",
    ),
    "a call keeps its workspace": Control(
        PREPARED_CALLS,
        "  const std::shared_ptr<const CallContext> context = ",
        "  const std::shared_ptr<const CallContext>& context = ",
        "tests/runtime/test_prepared_faults.py::test_a_handler_takes_the_workspace_of_a_call_that_waits[reset-False-True]",
    ),
    "None is no integer": Control(
        "kernels/cpu/prepared_calls.h",
        "key.push_back(kNone);",
        "key.append({kInt, -1});",
        "tests/ops/test_prepared.py::test_a_value_of_another_kind_is_another_call",
    ),
    "a heap gives memory back": Control(
        "kernels/cpu/results_heap.h",
        "  memory_->meet();\n",
        "",
        "tests/runtime/test_results_heap.py::test_a_heap_gives_back_what_a_program_needs_no_more",
    ),
    "a search is bounded": Control(
        "kernels/cpu/free_ranges.h",
        "    if (++steps == kMostSteps) it = std::prev(free_.end());\n",
        "",
        "tests/runtime/test_results_heap.py::test_a_heap_in_pieces_costs_no_long_search",
    ),
    "a retired block is not used again": Control(
        "kernels/cpu/heap_memory.h",
        "    if (retired_) return nullptr;\n",
        "",
        "tests/runtime/test_results_heap.py::test_results_of_a_retired_heap_stay_and_none_follow",
    ),
    "memory has one heap": Control(
        "kernels/cpu/heap_memory.h",
        "if (memory->overlaps(*other)) throw",
        "if (false && memory->overlaps(*other)) throw",
        "tests/runtime/test_results_heap.py::test_memory_in_use_by_another_heap_is_refused",
    ),
    "results that are kept grow no heap": Control(
        "kernels/cpu/admission.h",
        "freed >= 2 && freed > results.kept",
        "freed >= 0 || freed > results.kept",
        "tests/runtime/test_results_heap.py::test_it_never_grows_for_results_that_are_kept",
    ),
    # security
    "a forked child has no vote": Control(
        "fusedcomm/runtime/group.py",
        "    _forked = dist.is_initialized()",
        "    _forked = False",
        "tests/runtime/test_process_ends.py::test_ranks_end_without_a_crash[forks]",
    ),
    "votes of others are refused": Control(
        "fusedcomm/runtime/vote.py",
        '        if types != {"attempt": str, "seen": list, "facts": dict}:',
        "        if False:",
        "tests/runtime/test_vote.py::test_a_hostile_post_is_an_error_in_bounded_time",
    ),
    "a segment is sealed": Control(
        "kernels/cpu/segment.h",
        '  if (fcntl(fd_, F_ADD_SEALS, kSeals) != 0) throw system_error("cannot seal a segment");\n',
        "",
        "tests/runtime/test_rendezvous.py::test_sizes_that_differ",
    ),
    "a segment that is not sealed is refused": Control(
        "kernels/cpu/segment.h",
        "seals >= 0 && (seals & kSeals) == kSeals && ",
        "",
        "tests/runtime/test_rendezvous.py::test_memory_that_could_be_cut_off_is_refused",
    ),
    "peer indices are checked": Control(
        WORKSPACE,
        '        assert 0 <= rank < self.group_size, f"rank must be in [0, {self.group_size}), got {rank}"\n',
        "",
        "tests/package/test_security.py::test_a_round_refuses_ranks_outside_the_group",
    ),
    "dumps are their owner's": Control(
        "fusedcomm/files.py",
        "        os.replace(temporary, file)",
        "        os.chmod(temporary, 0o644)\n        os.replace(temporary, file)",
        "tests/runtime/test_dumps.py::test_an_error_leaves_a_dump_for_its_owner_alone",
    ),
    "ranks listen on loopback only": Control(
        "fusedcomm/launch/ranks.py",
        'socket.create_server(("127.0.0.1", 0))',
        'socket.create_server(("", 0))',
        "tests/package/test_security.py::test_ranks_and_who_starts_them_listen_on_loopback",
    ),
    "cache files of others are refused": Control(
        "fusedcomm/files.py",
        "        if facts.st_uid != os.geteuid():",
        "        if False:",
        "tests/cost/test_tuned.py::test_a_file_that_others_may_have_written_is_ignored",
    ),
}


def main(names: list[str]) -> int:
    failed = 0
    for name in names or CONTROLS:
        reason = CONTROLS[name].run()
        failed += reason is not None
        print(f"{name}: {reason or 'its test fails without it'}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

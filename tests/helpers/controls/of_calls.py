"""Protections of a call: values, sizes, bounds of waits, and what a failure leaves behind."""

from tests.helpers.controls.control import Control

EXECUTOR = "fusedcomm/run/python_executor.py"
MOVES = "fusedcomm/plan/moves.py"
WORKSPACE = "fusedcomm/memory/workspace.py"
MEMBER = "fusedcomm/memory/group_member.py"
MEMBERS = "fusedcomm/memory/members.py"
PRIMITIVES = "kernels/triton/primitives.py"
ROWS_OF_EXPERTS = "tests/kernels/test_token_rows.py::test_rows_and_sums_are_right_in_a_random_order"

CONTROLS: dict[str, Control] = {
    # values
    "a second slot": Control(
        "fusedcomm/memory/segment.py",
        "return self.header_bytes + epoch % NUM_SLOTS * slot_bytes",
        "return self.header_bytes",
        "tests/memory/test_workspace.py::test_many_calls_with_a_late_rank_are_exact",
    ),
    "data before the flag": Control(
        MOVES,
        "                    s.copy(part.view(chunk.shape), chunk)\n            self._signal(dst_rank)",
        "                    self._signal(dst_rank)\n                    s.copy(part.view(chunk.shape), chunk)",
        "tests/ops/test_one_op.py::test_a_list_of_weights_shares_one_gather",
    ),
    "a descriptor of x has x's width as its stride": Control(
        "fusedcomm/plan/descriptors.py",
        "tuple(x.shape), (x.shape[1], 1)",
        "tuple(x.shape), (x.stride(0), 1)",
        "tests/plan/test_descriptors.py::test_one_row_of_a_wider_tensor_has_a_descriptor",
    ),
    "rows of w that overlap have no descriptor": Control(
        "fusedcomm/plan/descriptors.py",
        "    if step < row or (not follow and",
        "    if (not follow and",
        "tests/plan/test_descriptors.py::test_rows_that_overlap_have_no_descriptor[False]",
    ),
    "exchanges of uneven shards stay": Control(
        "fusedcomm/compile/graph/normalize.py",
        "        start.meta[UNEVEN] = _uneven(exchange)\n",
        "",
        "tests/compile/test_spellings.py::test_all_ranks_leave_it[True-7-4]",
    ),
    "a wait before each read": Control(
        EXECUTOR,
        "                self.workspace.wait(work.src_rank, self.epoch, self.op, self.fingerprint)",
        "                pass",
        "tests/memory/test_workspace.py::test_many_calls_with_a_late_rank_are_exact",
    ),
    "a round on a CPU has an end": Control(
        MOVES,
        "        s.add(EndRound())\n\n    def _unpack_by_kernel",
        "\n    def _unpack_by_kernel",
        "tests/memory/test_workspace.py::test_many_calls_with_a_late_rank_are_exact",
    ),
    "a round on a GPU has an end": Control(
        MOVES,
        "        s.add(EndRound(by_kernel=True))",
        "        pass",
        "tests/plan/test_schedule.py::test_nothing_races[2-chunked]",
    ),
    "the last program of a chunk signals": Control(
        PRIMITIVES,
        "if before + num_stored == num_parts:",
        "if before >= 0:",
        "tests/kernels/test_push_matmul.py::test_a_chunk_is_signalled_when_all_programs_have_stored_it",
    ),
    "the last program of a round counts it": Control(
        PRIMITIVES,
        "if arrivals + 1 == tl.num_programs(0):",
        "if arrivals >= 0:",
        "tests/kernels/test_reduce.py::test_every_shape",
    ),
    "rows that fit no slot stay in their own": Control(
        "kernels/triton/slot_places.py",
        "tl.where(tl.max(sums, axis=0) <= capacity, found, own)",
        "found",
        ROWS_OF_EXPERTS + "[3-6-Case(lead=2, own=2, k=3, kind='any', room='less', alignment=4, dtype=torch.bfloat16)]",
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
        "        at = first + i\n",
        "        at = (first + i).to(tl.int32)\n",
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
        "tests/kernels/test_large_slots.py::test_w_is_read_where_it_lies",
    ),
    "columns of a gather's w have 64 bits": Control(
        "kernels/triton/gather_matmul.py",
        "            w_columns = w_columns.to(tl.int64)\n",
        "            pass\n",
        "tests/kernels/test_large_slots.py::test_w_is_read_where_it_lies",
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
        "fusedcomm/memory/segment.py",
        "MOST_SLOT_BYTES = (1 << 32) - (1 << 13)",
        "MOST_SLOT_BYTES = 3 << 31",
        "tests/kernels/test_large_slots.py",
    ),
    "K and N of fused are counted in 32 bits": Control(
        "fusedcomm/plan/planner.py",
        "        if size > MOST_INDICES:",
        "        if False:",
        "tests/plan/test_planner.py::test_what_a_slot_does_not_bound_is_counted_in_32_bits",
    ),
    "a stride of w fits its descriptor": Control(
        "fusedcomm/plan/descriptors.py",
        "        max(num_bytes) < _DESCRIBED_BYTES\n        and ",
        "        ",
        "tests/plan/test_descriptors.py::test_strides_of_descriptors_are_below_a_terabyte",
    ),
    # hangs
    "a bound of waits": Control(
        WORKSPACE,
        "        self.timeout_s = env.timeout_s()",
        "        self.timeout_s = 3600.0",
        "tests/memory/test_faults.py::test_a_peer_that_never_calls[chunked-later-call]",
    ),
    "a bound of waits in kernels": Control(
        WORKSPACE,
        "int(self.timeout_s * 1e9)",
        "int(3600e9)",
        "tests/memory/test_faults.py::test_a_peer_that_never_calls[fused-later-call]",
    ),
    "a bound of votes": Control(
        "fusedcomm/memory/vote.py",
        "        self.timeout = env.timeout_s()",
        "        self.timeout = 3600.0",
        "tests/memory/test_faults.py::test_a_peer_that_never_calls[chunked-first-call]",
    ),
    "a bound of torch's rendezvous on GPUs": Control(
        MEMBER,
        "            if left <= 0:\n",
        "            if False:\n",
        "tests/memory/test_vote.py::test_a_rendezvous_that_blocks_ends_in_the_vote",
    ),
    "a bound of a store that is cut off": Control(
        "fusedcomm/memory/vote.py",
        "result.result(max(0.0, self.deadline - time.monotonic()) + STORE_GRACE_S)",
        "result.result()",
        "tests/memory/test_vote.py::test_a_store_that_is_cut_off_ends_the_vote_in_time",
    ),
    "peers are told of a failure": Control(
        WORKSPACE,
        "            self._signal_broken(dst, self.rank, kind, epoch)\n",
        "            if dst == self.rank:\n                self._signal_broken(dst, self.rank, kind, epoch)\n",
        "tests/memory/test_prepared_faults.py::test_a_rank_that_goes_on_when_its_peer_has_given_up",
    ),
    "growth meets before it waits": Control(
        MEMBER,
        "            self._come_together(self.workspace, op, ~fingerprint & FINGERPRINT)\n",
        "",
        "tests/memory/test_faults.py::test_a_peer_in_another_call[needs-growth-chunked-later-call]",
    ),
    # wrong numbers after a failure
    "calls that differ are told apart": Control(
        WORKSPACE,
        "        if flag != epoch << FINGERPRINT_BITS | fingerprint:",
        "        if flag >> FINGERPRINT_BITS != epoch:",
        "tests/memory/test_faults.py::test_a_peer_with_other_shapes_or_dims",
    ),
    "a round left half way is broken": Control(
        WORKSPACE,
        "        self._give_up(ABANDONED, epoch)",
        "        pass",
        "tests/memory/test_faults.py::test_a_round_left_half_way_is_never_taken_for_the_next[chunked]",
    ),
    "a rank that ends tells its peers": Control(
        WORKSPACE,
        "                self._tell_departure(peer, self.rank, last_words, epoch)",
        "                pass",
        "tests/memory/test_exits.py::test_peers_hear_why_a_rank_has_left[while-they-wait]",
    ),
    "a rank that ends spoils no round before": Control(
        WORKSPACE,
        "                self._tell_departure(peer, self.rank, last_words, epoch)",
        "                self._tell_departure(peer, self.rank, last_words, epoch - 1)",
        "tests/memory/test_exits.py::test_a_rank_that_ends_spoils_no_round_before",
    ),
    "a process that is gone is looked for": Control(
        WORKSPACE,
        "            gone = {src for src in range(self.group_size) if self.departures.is_gone(src)}",
        "            gone = set()",
        "tests/memory/test_exits.py::test_a_process_that_is_gone_is_found",
    ),
    "all are told of the cause before its consequence": Control(
        WORKSPACE,
        "            self._forward(src)",
        "            pass",
        "tests/memory/test_faults.py::test_whoever_comes_later_blames_the_rank_that_left_its_call",
    ),
    "a look at the broken words where all signals are there": Control(
        WORKSPACE,
        '        if self.device.type == "cpu" and self.breakers(epoch):',
        "        if False:",
        "tests/memory/test_faults.py::test_a_peer_that_never_calls",
    ),
    "a look at the broken words after the reads of a kernel": Control(
        PRIMITIVES,
        "    failed = failed | is_broken(round, LAYOUT)\n",
        "",
        "tests/kernels/test_failed_waits.py::test_broken_by_a_peer[True-reduce]",
    ),
    "a norm waits for the source of its rows": Control(
        "kernels/triton/reduce_norm.py",
        "            failed = wait_source(src_rank, round, failed, LAYOUT)\n",
        "            pass\n",
        "tests/kernels/test_failed_waits.py::test_time_out_names_who_is_missing[unpack and norm]",
    ),
    "a failed rank tells who still reads before it pushes": Control(
        PRIMITIVES,
        "    give_up_earlier(segments_ptr, rank, LAYOUT)\n",
        "",
        "tests/protocol/test_late_failure.py::test_who_still_reads_is_told",
    ),
    "a failed vote is not tried again": Control(
        MEMBERS,
        "            if device in group.errors:",
        "            if False:",
        "tests/memory/test_faults.py::test_a_rank_that_is_late_for_the_first_call_does_not_meet_the_second",
    ),
    "a workspace that could not be made is not tried again": Control(
        MEMBER,
        "        if self.error is not None:",
        "        if False:",
        "tests/memory/test_faults.py::test_a_peer_that_never_calls[chunked-first-call]",
    ),
    "an error that is kept holds on to nothing": Control(
        MEMBERS,
        "                raise group.errors[device].again() from failed",
        "                raise group.errors[device] from failed",
        "tests/memory/test_reset.py::test_a_failed_call_keeps_neither_its_group_nor_its_tensors",
    ),
    "a reset makes slots of one size": Control(
        MEMBERS,
        '        yield [(known.members[d], max(fact["slots"][d.type] for fact in facts)) for d in devices]',
        "        yield [(known.members[d], known.members[d].slot_bytes) for d in devices]",
        "tests/memory/test_reset.py::test_a_reset_makes_slots_of_one_size",
    ),
    "segments of captured graphs are kept": Control(
        MEMBER,
        "            self.retired.append(self.workspace)",
        "            pass",
        "tests/memory/test_workspace.py::test_retired_segments_are_kept_and_watched",
    ),
    "native calls look whether a replay has failed": Control(
        MEMBER,
        "for each in (self.workspace, *self.retired)]",
        "for each in (self.workspace,)]",
        "tests/memory/test_workspace.py::test_retired_segments_are_kept_and_watched",
    ),
    "a capture drops native plans": Control(
        MEMBER,
        "if is_capturing(self.device) and not self.workspace.captured:",
        "if False:",
        "tests/ops/test_captures.py::test_a_first_capture_drops_native_plans_alone",
    ),
    "calls leave a captured workspace": Control(
        MEMBER,
        "        leaves = self.workspace.captured and not is_for_capture(self.device)",
        "        leaves = False",
        "tests/ops/test_captures.py::test_calls_leave_a_captured_workspace_to_the_graphs",
    ),
    "a round's sends come after the reads of the one before": Control(
        MOVES,
        "            s.join(SENDS, self.reads)\n",
        "",
        "tests/plan/test_schedule.py::test_nothing_races[2-chunked]",
    ),
    "a fused gather on all SMs begins when the queue of its copies has come to them": Control(
        "fusedcomm/plan/fused.py",
        "            s.after(MAIN, begun)",
        "            pass",
        "tests/plan/test_schedule_queues.py::test_no_call_hangs_beside_nccl[2-fused]",
    ),
    "the own chunk of a gather by a kernel is only signalled": Control(
        "kernels/triton/copy.py",
        "        if (step > 0) | TRAITS.own:\n            chunk = slot + tl.cast(rank, tl.int64)",
        "        if True:\n            chunk = slot + tl.cast(rank, tl.int64)",
        "tests/run/test_fused_gather.py::test_the_own_chunk_does_not_go_through_the_slot",
    ),
    "the own chunk of a gather by copy engines is only signalled": Control(
        "fusedcomm/plan/fused.py",
        "        if own:\n            _copy(s, x, spans, s.rank)",
        "        _copy(s, x, spans, s.rank)",
        "tests/run/test_fused_gather.py::test_the_own_chunk_does_not_go_through_the_slot",
    ),
    "a gather waits for the own signal of a chunk that it leaves out": Control(
        "kernels/triton/gather_matmul.py",
        "            failed = wait_source(rank, next_round(segments_ptr, rank, fingerprint), failed, LAYOUT)\n",
        "            pass\n",
        "tests/kernels/test_gather_matmul.py::test_all_rows_are_poisoned_where_a_signal_is_missing[0]",
    ),
    "each round takes the staging of the last one": Control(
        MOVES,
        "                self.copied[dst_rank] = s.event(SENDS)\n",
        "",
        "tests/run/test_chunked_orders.py::test_each_round_takes_the_staging_of_the_last_one",
    ),
    "the callers of chunked come after all of its streams": Control(
        MOVES,
        "            self.s.join(MAIN, SENDS)\n            self.s.join(MAIN, self.reads)",
        "            pass",
        "tests/run/test_chunked_orders.py::test_every_op_is_right_in_a_random_order",
    ),
    "Ctrl-C in a call leaves none of its streams running on": Control(
        EXECUTOR,
        "        execution.join()\n        raise",
        "        raise",
        "tests/run/test_chunked_orders.py::test_ctrl_c_leaves_all_streams_joined",
    ),
    # parts of different sizes
    "chunks of different sizes lie as far apart as the largest": Control(
        "fusedcomm/plan/builder.py",
        "start = src_rank * spans.chunk_numel * dtype.itemsize",
        "start = src_rank * numel * dtype.itemsize",
        "tests/ops/test_uneven.py::test_values_and_gradients[tokens-7-of-3-chunked]",
    ),
    "who has which part is part of a call": Control(
        "fusedcomm/plan/geometry/exchange.py",
        "return *self.for_all.payload, self.cut.gathered, self.cut.scattered, self.gathers",
        "return self.for_all.payload",
        "tests/ops/test_uneven.py::test_ranks_that_disagree_are_told[0]",
    ),
    "the check compares what only some ranks say": Control(
        "fusedcomm/ops/call_check.py",
        "in max(calls_by_rank, key=len):",
        "in calls_by_rank[rank]:",
        "tests/ops/test_uneven.py::test_the_check_finds_ranks_that_disagree[matmul_reduce_scatter]",
    ),
    "peers hear of a type that one rank alone finds wrong": Control(
        "fusedcomm/ops/arguments.py",
        "tell_peers(op, resolve(group)[1], x, error)",
        "pass",
        "tests/ops/test_call_check.py::test_peers_hear_of_errors",
    ),
    "peers hear of parameters that one rank alone finds wrong": Control(
        "fusedcomm/nn/whole_model.py",
        """        if each["error"]:""",
        """        if False:""",
        "tests/nn/test_changed_layers.py::test_gradients_that_some_ranks_lack",
    ),
    "a shared gradient is one call, whatever a rank multiplies for it": Control(
        "fusedcomm/plan/planner.py",
        "fingerprint_of(KINDS[op], dtype",
        "fingerprint_of(op, dtype",
        "tests/parallel/test_reading_hooks.py::test_one_rank_changes_the_gradient[chunked]",
    ),
    "all plans of a group take bounded memory": Control(
        "fusedcomm/memory/group_member.py",
        "if self.plan_bytes > self.topology.plan_bytes:",
        "if False:",
        "tests/ops/test_prepared.py::test_plans_that_take_too_much_are_dropped",
    ),
    "a call is for the rank that makes it": Control(
        "fusedcomm/ops/dispatch.py",
        "if exchange.cut is not None and exchange.cut.rank != pg.rank():",
        "if False:",
        "tests/ops/test_uneven_graphs.py::test_a_rank_that_is_not_this_one_is_refused",
    ),
}

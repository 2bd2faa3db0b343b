"""Protections of calls on CPUs: prepared calls, results in place, and their memory."""

from tests.helpers.controls.control import Control

PREPARED = "fusedcomm/ops/prepared.py"
PLAN = "kernels/cpu/plan.cpp"
PREPARED_CALLS = "kernels/cpu/prepared_calls.cpp"
TRAINING_CALLS = "kernels/cpu/training_calls.cpp"
MEMBERS = "fusedcomm/memory/members.py"

CONTROLS: dict[str, Control] = {
    # prepared calls
    "arguments of a call whose plan is kept have storages of their own": Control(
        PREPARED,
        "    args, kwargs = pytree.tree_map_only(Tensor, loaded().alias, (args, kwargs))  # x may be w\n",
        "",
        "tests/ops/test_prepared.py::test_arguments_that_share_a_storage_while_they_are_recorded",
    ),
    "a kind of call has strides": Control(
        "kernels/cpu/prepared_calls.h",
        "    key.append(t.strides().begin(), t.strides().end());\n",
        "",
        "tests/ops/test_prepared.py::test_layouts_of_arguments[chunked]",
    ),
    "a reset drops plans": Control(
        PREPARED_CALLS,
        "  ++generation_;\n  calls_.clear(dropped);\n",
        "",
        "tests/ops/test_prepared.py::test_what_drops_plans[reset]",
    ),
    "a plan that was found before a reset is not run": Control(
        PREPARED_CALLS,
        "call.generation != generation_ || ",
        "",
        "tests/ops/test_prepared.py::test_a_plan_that_a_thread_has_found_is_dropped_too",
    ),
    "a plan that was made before a reset is not kept": Control(
        PREPARED_CALLS,
        "  if (key.front() != generation_) return;\n",
        "",
        "tests/ops/test_prepared.py::test_a_plan_that_is_made_while_others_go_is_dropped",
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
        "tests/ops/test_prepared.py::test_autocast_does_not_reach_into_a_call[outside-chunked]",
    ),
    "a prepared round that is left half way is broken": Control(
        PREPARED_CALLS,
        "if (!context.is_broken()) with_gil",
        "if (false) with_gil",
        "tests/memory/test_prepared_faults.py::test_ctrl_c_before_python_has_begun_to_wait",
    ),
    "a forked child runs no prepared call": Control(
        PREPARED_CALLS,
        "  if (forked) return nullptr;\n",
        "",
        "tests/memory/test_prepared_faults.py::test_a_forked_child_is_no_rank",
    ),
    "a look at the broken words where all signals are there, in a prepared call too": Control(
        "kernels/cpu/rounds.h",
        "    if (any_broken(own + segments_.broken, segments_.group_size, *epoch_)) failed_(*epoch_);\n",
        "",
        "tests/ops/test_in_place_faults.py::test_a_stopped_peer_writes_into_no_later_tensor[prepared]",
    ),
    "a chunk in place is marked in a prepared call too": Control(
        PLAN,
        "        return rounds_.mark_in_place(step.rank);",
        "        return;",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[True-2]",
    ),
    "a step with a condition asks for it in a prepared call too": Control(
        PLAN,
        "      if (each.condition >= 0 && answers_[static_cast<size_t>(each.condition)] != each.if_so) continue;\n",
        "",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[True-2]",
    ),
    # at the end of the interpreter
    "the main thread is never held back": Control(
        "kernels/cpu/gil.h",
        " && syscall(SYS_gettid) != getpid()",
        "",
        "tests/memory/test_exits.py::test_ranks_end_without_a_crash[waits_at_the_end]",
    ),
    "a daemon thread is held back": Control(
        "kernels/cpu/gil.h",
        "  while (interpreter_ends() && ",
        "  while (false && ",
        "tests/memory/test_exits.py::test_ranks_end_without_a_crash[thread_waits]",
    ),
    # results in place
    "a post is of this round": Control(
        "kernels/cpu/rounds.h",
        "stamp_of(dst_rank) != stamp",
        "((stamp_of(dst_rank) ^ stamp) & 0xFFFFFF) != 0",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[True-2]",
    ),
    "a post is of this call": Control(
        "kernels/cpu/rounds.h",
        "stamp_of(dst_rank) != stamp",
        "stamp_of(dst_rank) >> kFingerprintBits != stamp >> kFingerprintBits",
        "tests/ops/test_in_place_faults.py::test_calls_that_differ_write_into_no_result_of_the_other[prepared]",
    ),
    "a post has the size that is written": Control(
        "kernels/cpu/rounds.h",
        "    if (load_word(words + sizeof(int64_t)) != num_bytes) return std::nullopt;\n",
        "",
        "tests/ops/test_in_place_faults.py::test_calls_with_one_fingerprint_write_beyond_no_result[prepared]",
    ),
    "a mark is of this round": Control(
        "kernels/cpu/rounds.h",
        "load_word(mark_of(rank, src_rank, epoch)) == epoch;",
        "load_word(mark_of(rank, src_rank, epoch)) > 0;",
        "tests/ops/test_in_place.py::test_results_that_are_held_are_never_changed[True-2]",
    ),
    "a post is of this layout": Control(
        "kernels/cpu/rounds.h",
        "stamp_of(dst_rank) != stamp",
        "stamp_of(dst_rank) >> kFingerprintBits != stamp >> kFingerprintBits",
        "tests/ops/test_in_place.py::test_ranks_of_one_wire_may_want_other_layouts[prepared]",
    ),
    "a result that the caller gives is not posted": Control(
        "fusedcomm/plan/moves.py",
        "        if out is not None:\n            return out\n",
        "        if out is not None:\n            self.posted = out\n            return out\n",
        "tests/ops/test_in_place.py::test_a_result_that_is_given_is_not_posted",
    ),
    "a result that nobody posts takes no block": Control(
        "fusedcomm/memory/workspace.py",
        "if posted and self.results is not None:",
        "if self.results is not None:",
        "tests/ops/test_in_place.py::test_only_results_that_are_posted_take_blocks[matmul_reduce_scatter-scatter-python]",
    ),
    # results in symmetric memory
    "a forked child has results of its own": Control(
        "kernels/cpu/heap_memory.h",
        "memory->make_private();",
        "(void)memory;",
        "tests/memory/test_heap_forks.py::test_a_child_writes_into_memory_of_its_own",
    ),
    "memory is made private once": Control(
        "kernels/cpu/heap_memory.h",
        "  if (private_) return;\n  private_ =",
        "  private_ =",
        "tests/memory/test_heap_forks.py::test_a_child_of_a_child_keeps_what_the_child_wrote",
    ),
    "a block that a child may read is not used again": Control(
        "kernels/cpu/heap_memory.h",
        "  if (!seen_by_child) return",
        "  return",
        "tests/memory/test_heap_forks.py::test_a_block_that_a_child_may_read_is_not_used_again",
    ),
    "a child that has gone gives its blocks free": Control(
        "kernels/cpu/forks.h",
        "F_SEAL_WRITE) != 0",
        "F_SEAL_WRITE) != 1",
        "tests/memory/test_heap_forks.py::test_blocks_that_children_have_seen_are_used_again_when_those_are_gone",
    ),
    "a call keeps its workspace": Control(
        PREPARED_CALLS,
        "  const std::shared_ptr<const CallContext> context = context_;\n",
        "  const std::shared_ptr<const CallContext>& context = context_;\n",
        "tests/memory/test_prepared_faults.py::test_a_handler_takes_the_workspace_of_a_call_that_waits[False]",
    ),
    "None is no integer": Control(
        "kernels/cpu/prepared_calls.h",
        "key.push_back(kNone);",
        "key.append({kInt, -1});",
        "tests/ops/test_prepared.py::test_a_value_of_another_kind_is_another_call",
    ),
    "a heap gives memory back": Control(
        "kernels/cpu/results_heap.cpp",
        "  memory_->meet();\n",
        "",
        "tests/memory/test_results_heap.py::test_a_heap_gives_back_what_a_program_needs_no_more",
    ),
    "a search is bounded": Control(
        "kernels/cpu/free_ranges.h",
        "    if (++steps == kMostSteps) it = std::prev(free_.end());\n",
        "",
        "tests/memory/test_results_heap.py::test_a_heap_in_pieces_costs_no_long_search",
    ),
    "a retired block is not used again": Control(
        "kernels/cpu/heap_memory.h",
        "    if (retired_) return nullptr;\n",
        "",
        "tests/memory/test_results_heap.py::test_results_of_a_retired_heap_stay_and_none_follow",
    ),
    "memory has one heap": Control(
        "kernels/cpu/heap_memory.h",
        "if (memory->overlaps(*other)) throw",
        "if (false && memory->overlaps(*other)) throw",
        "tests/memory/test_results_heap.py::test_memory_in_use_by_another_heap_is_refused",
    ),
    "results that are kept grow no heap": Control(
        "kernels/cpu/admission.h",
        "freed >= 2 && freed > results.kept",
        "freed >= 0 || freed > results.kept",
        "tests/memory/test_results_heap.py::test_it_never_grows_for_results_that_are_kept",
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
    "second derivatives are taken in Python": Control(
        TRAINING_CALLS,
        "at::GradMode::is_enabled() || ",
        "",
        "tests/ops/test_training.py::test_a_program_does_the_same_in_python[second_derivatives-packed-qkv]",
    ),
    "gradients of parts that differ in size are Python's": Control(
        "kernels/cpu/gradients.cpp",
        "    if (!value(name).isNone()) return std::nullopt;\n",
        "    static_cast<void>(name);\n",
        "tests/ops/test_uneven.py::test_values_and_gradients[tokens-7-of-3-chunked]",
    ),
    "modes see a backward": Control(
        TRAINING_CALLS,
        " || !no_mode_is_on() || !all_plain",
        " || !all_plain",
        "tests/ops/test_training.py::test_a_program_does_the_same_in_python[under_modes-packed-qkv]",
    ),
}

"""Protections of calls on CPUs: prepared calls, in training too, and the end of the interpreter."""

from tests.helpers.controls.control import Control

PREPARED = "fusedcomm/ops/prepared.py"
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
        "tests/ops/test_prepared.py::test_layouts_of_arguments",
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
        "tests/ops/test_prepared.py::test_autocast_does_not_reach_into_a_call[outside-unfused]",
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
        "tests/memory/test_prepared_faults.py::test_a_rank_that_goes_on_when_its_peer_has_given_up",
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
        "tests/ops/test_training.py::test_a_program_does_the_same_in_python[second_derivatives-matmul_all_reduce-columns-divide]",
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
        "tests/ops/test_training.py::test_a_program_does_the_same_in_python[under_modes-all_gather_matmul-list-qkv]",
    ),
}

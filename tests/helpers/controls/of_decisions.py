"""Protections of what all ranks must decide alike, and against others than they."""

from tests.helpers.controls.control import Control

WORKSPACE = "fusedcomm/memory/workspace.py"
MEMBER = "fusedcomm/memory/group_member.py"

CONTROLS: dict[str, Control] = {
    # decisions that all ranks must make alike
    "hosts are voted on": Control(
        "fusedcomm/memory/topology.py",
        '        if fact["host"] != facts[0]["host"]:',
        "        if False:",
        "tests/memory/test_workspace.py::test_ranks_on_several_hosts_fall_back_together",
    ),
    "the smallest cap holds for all": Control(
        "fusedcomm/memory/topology.py",
        'min(fact["workspace_bytes"] for fact in facts)',
        "env.workspace_bytes()",
        "tests/memory/test_workspace.py::test_settings_that_differ_by_rank",
    ),
    "algorithms that are asked for are voted on": Control(
        "fusedcomm/memory/topology.py",
        "    if len(set(values)) > 1:",
        "    if False:",
        "tests/memory/test_workspace.py::test_settings_that_differ_by_rank",
    ),
    "a GPU's kernels are tried before the vote": Control(
        "fusedcomm/memory/topology.py",
        "_no_triton() or triton_probe.cannot_launch(device)",
        "_no_triton()",
        "tests/memory/test_triton_probe.py::test_one_rank_whose_kernels_do_not_run_makes_all_unfused",
    ),
    "TF32 settings are voted on": Control(
        "fusedcomm/memory/topology.py",
        'all(fact["tf32"] for fact in facts)',
        "tf32_allowed()",
        "tests/memory/test_workspace.py::test_ranks_with_other_tf32_settings_plan_alike",
    ),
    "tuned numbers are voted on": Control(
        "fusedcomm/memory/topology.py",
        "if no_workspace is not None or not _all_have_the_same(facts, rank):",
        "if no_workspace is not None:",
        "tests/plan/test_tuned.py::test_tuned_numbers_decide_on_all_ranks_or_on_none",
    ),
    "numbers are of groups with a workspace": Control(
        "fusedcomm/memory/topology.py",
        "if no_workspace is not None or not _all",
        "if not _all",
        "tests/plan/test_tuned.py::test_a_group_across_hosts_plans_by_data_sheets",
    ),
    "a rank without memory is heard of": Control(
        MEMBER,
        '"error": error}',
        '"error": ""}',
        "tests/memory/test_faults.py::test_a_rank_without_memory_makes_all_run_unfused",
    ),
    "votes compare what they are about": Control(
        MEMBER,
        "    if others:\n        calls = ",
        "    if False:\n        calls = ",
        "tests/memory/test_faults.py::test_reset_against_close_is_a_mismatch",
    ),
    "old posts do not count in a vote": Control(
        "fusedcomm/memory/vote.py",
        '        elif None not in attempts and all(post and post["seen"] == seen for post in latest):',
        "        elif None not in attempts:",
        "tests/memory/test_vote.py::test_old_posts_do_not_count",
    ),
    "an algorithm is proved before its use": Control(
        "fusedcomm/ops/dispatch.py",
        "        while proof.is_unproved(plan, record.dtype, ours, uneven):",
        "        while False:",
        "tests/ops/test_proof.py::test_what_fails_its_proof_is_off_for_all_ranks[wrong-packed-qkv]",
    ),
    "a capture loads no kernels": Control(
        "fusedcomm/ops/dispatch.py",
        "        if is_capturing(ours.device) and not ours.loaded.has(kind, workspace.slot_bytes):",
        "        if False:",
        "tests/ops/test_captures.py::test_a_capture_runs_what_a_call_before_it_has_loaded",
    ),
    "all ranks vote on a proof": Control(
        "fusedcomm/ops/proof.py",
        'return str(min(failed, default=(_WRONG, 0, ""))[2])',
        "return text",
        "tests/ops/test_proof.py::test_what_fails_its_proof_is_off_for_all_ranks[wrong-packed-qkv]",
    ),
    "a proof is bounded": Control(
        "fusedcomm/ops/proof.py",
        "workspace.timeout_s = BOUND_S",
        "workspace.timeout_s = 3600.0",
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
        "fusedcomm/memory/topology.py",
        'any(fact["check"] for fact in facts)',
        "env.check()",
        "tests/ops/test_call_check.py::test_it_is_on_for_all_ranks_if_one_asks",
    ),
    "a look at the guard bytes": Control(
        "fusedcomm/memory/canaries.py",
        "    wrong = found != _pattern(layout.guard_bytes)\n",
        "    wrong = torch.zeros_like(found, dtype=torch.bool)\n",
        "tests/memory/test_canaries.py::test_an_overrun_of_a_peer_is_told_to_all_ranks",
    ),
    # security
    "a forked child has no vote": Control(
        "fusedcomm/memory/group.py",
        "    _forked = dist.is_initialized()",
        "    _forked = False",
        "tests/memory/test_reset.py::test_a_child_of_before_the_first_call_is_no_rank_either",
    ),
    "votes of others are refused": Control(
        "fusedcomm/memory/vote.py",
        '        if types != {"attempt": str, "seen": str, "facts": dict}:',
        "        if False:",
        "tests/memory/test_vote.py::test_a_hostile_post_is_an_error_in_bounded_time",
    ),
    "a segment is sealed": Control(
        "kernels/cpu/segment.h",
        '  if (fcntl(fd_, F_ADD_SEALS, kSeals) != 0) throw system_error("cannot seal a segment");\n',
        "",
        "tests/memory/test_rendezvous.py::test_sizes_that_differ",
    ),
    "a segment that is not sealed is refused": Control(
        "kernels/cpu/segment.h",
        "seals >= 0 && (seals & kSeals) == kSeals && ",
        "",
        "tests/memory/test_rendezvous.py::test_memory_that_could_be_cut_off_is_refused",
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
        "tests/memory/test_dumps.py::test_an_error_leaves_a_dump_for_its_owner_alone",
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
        "tests/plan/test_tuned.py::test_a_file_that_others_may_have_written_is_ignored",
    ),
    "no tensor goes to the all_gather in which gloo crashes": Control(
        "fusedcomm/run/reference.py",
        "    if (t.is_cuda or on_cpu) and _is_gloo(group_name, t.device.type):",
        "    if False:",
        "tests/memory/test_gloo.py::test_no_collective_that_ends_the_process_gets_cuda_tensors",
    ),
    "Dynamo sees no event": Control(
        "fusedcomm/run/device_to_host.py",
        "self._has_event:\n            return _outside_graphs(DeviceToHost.wait, self)",
        "False:\n            return _outside_graphs(DeviceToHost.wait, self)",
        "tests/run/test_device_to_host.py::test_compiled_code_waits_in_every_call_and_dynamo_does_not_see_the_event",
    ),
}

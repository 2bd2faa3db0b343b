"""The functions that the model mirrors, by part of the model, with digests (tests/protocol/mirrors.py)."""

from __future__ import annotations

from tests.protocol.mirrors import Mirrors

MIRRORED: Mirrors = {
    "scenario.compile_script, _sends and _receives": {
        "fusedcomm/memory/segment.py:HeaderLayout": ("flag slot post mark", "1c9c738f24f6"),
        "fusedcomm/memory/workspace.py:Workspace": ("end_round launched handshake", "20386f20ce1c"),
        "fusedcomm/plan/builder.py:Builder": ("chunk", "d7f62ea79c5e"),
        "fusedcomm/plan/chunked.py": (
            "push_matmul push_reduce push_reduce_gather gather_matmul _multiply_from",
            "da48afe8366a",
        ),
        "fusedcomm/plan/fused.py": (
            "push_matmul push_reduce push_reduce_gather gather_matmul _push_sum _send _copy",
            "60aad7a27d04",
        ),
        "fusedcomm/memory/launch_order.py": ("ordered", "fd55578709e3"),
        "fusedcomm/plan/planner.py": ("_reject_uneven _reject_reason", "ce2c04d78d78"),
        "kernels/triton/rounds.py": (
            "next_round slot_of end_round report signal_peer source_rank all_there wait_all",
            "0bd0bc60de56",
        ),
        "kernels/triton/primitives.py": ("flags_of flag_value", "b7a397fe7da3"),
        "kernels/cpu/rounds.h": ("slot slot_offset end", "65998c65e20e"),
        "kernels/cpu/plan.cpp": ("in_order operator()", "befac8fe69ba"),
        "kernels/cpu/prepared_calls.cpp": ("run_plan", "70a36e6bbeac"),
        "fusedcomm/plan/geometry/rank_order.py": ("peers_of sources_of", "b7f2a4c93f2a"),
        "fusedcomm/plan/moves.py:Moves": (
            "begin push _push_staged pack unpack _unpack_by_kernel _unpack_parts reduce finish _end_round _signal",
            "26317000828e",
        ),
        "fusedcomm/plan/launches.py": ("push pack gather_matmul unpack reduce signal _finish", "073729e273f5"),
        "fusedcomm/run/python_executor.py:Execution": ("steps step tensor _base _signal _end_round", "3807ec0eacf8"),
        "fusedcomm/memory/signals.py": ("signal wait", "e237958663e7"),
        "kernels/triton/push_matmul.py": ("push_matmul_kernel", "f61d253beedd"),
        "kernels/triton/copy.py": ("pack_kernel unpack_kernel", "db8a85d27a00"),
        "kernels/triton/handshake.py": ("signal_kernel finish_kernel", "470bacf2e47d"),
        "kernels/triton/gather_matmul.py": ("gather_matmul_kernel", "771f7a2a07a6"),
        "kernels/triton/reduce.py": ("reduce_kernel", "971ce21cf7c9"),
    },
    "programs.ProgramModel": {
        "kernels/triton/rounds.py": ("next_round report wait_source end_round", "7588da6e2b56"),
        "kernels/triton/push_matmul.py": ("push_matmul_kernel", "f61d253beedd"),
        "kernels/triton/copy.py": ("pack_kernel", "99d07ed1c94a"),
        "kernels/triton/gather_matmul.py": ("gather_matmul_kernel", "43544b44f3a8"),
        "fusedcomm/plan/fused.py": ("gather_matmul _send", "72dbe9bc44dc"),
    },
    "model.ProtocolModel: calls": {
        "fusedcomm/memory/workspace.py:Workspace": (
            "enter check check_peers signal _must_stop wait breakers",
            "bf9d695d808b",
        ),
        "fusedcomm/run/calls.py": ("run", "835774f0df42"),
        "kernels/cpu/prepared_calls.h": ("is_broken", "70b0f922579d"),
        "kernels/cpu/prepared_calls.cpp": ("run", "b79db9fd5d84"),
        "kernels/cpu/flags.h": ("signal_word wait_word any_broken", "c72019ab72f6"),
        "kernels/triton/primitives.py": (
            "signal wait poll poll_broken is_broken given_up give_up_earlier",
            "b08c677d67a4",
        ),
        "kernels/cpu/rounds.h": ("signal flag wait", "b67fbe32f343"),
        "kernels/cpu/spin.h": ("again", "c61eb2c3da2e"),
        "kernels/triton/rounds.py": ("wait_source must_poison next_push", "3b4714b0cc98"),
        "kernels/triton/handshake.py": ("wait_source_kernel begin_push_kernel", "5e8de1da4009"),
        "fusedcomm/plan/launches.py": ("begin_push wait_source", "5a313c8cb1f3"),
    },
    "model.ProtocolModel: failures and resets": {
        "fusedcomm/memory/workspace.py:Workspace": ("leave fail guarded abandon _give_up initialise", "394142365cdb"),
        "kernels/triton/primitives.py": ("fail", "5ef040b57d7d"),
        "fusedcomm/memory/members.py": ("_all_members reset", "6bdd0ab135ed"),
        "fusedcomm/memory/group_member.py:Member": (
            "reset _make _allocate _agree _free _come_together",
            "869ce0092f63",
        ),
        "fusedcomm/memory/vote.py": ("agree", "4dbc9ecded3c"),
        "fusedcomm/memory/vote.py:_Vote": ("leave_together", "9cfa3c303baf"),
    },
    "results.ResultsInPlace": {
        "fusedcomm/plan/moves.py:Moves": ("result begin push pack _ask arrivals unpack", "2d2d0342e084"),
        "kernels/cpu/rounds.h": (
            "empty post post_of is_peer_late has_posted posted mark_in_place mark is_in_place",
            "6ce18dc36fce",
        ),
        "kernels/cpu/heap_memory.h": ("take give_back release_held punch retire", "6c939b028934"),
        "fusedcomm/memory/posts.py:Posts": ("post has_come find mark is_marked", "7c44491518c7"),
        "fusedcomm/memory/results.py:Results": ("at_peer retire", "a3ac5fff8b70"),
        "kernels/cpu/plan.cpp": ("ask", "0812844d5fb4"),
        "fusedcomm/memory/workspace.py:Workspace": (
            "post all_have_posted posted _stamp _retire_results fail _give_up abandon",
            "ff26cc7b359b",
        ),
        "fusedcomm/memory/group_member.py:Member": ("reset close _make_results _drop_results _share", "06e3bc952c58"),
    },
}

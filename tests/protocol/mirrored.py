"""The functions that the model mirrors, by part of the model, with digests (tests/protocol/mirrors.py).

A call's writes, signals, waits and reads come from its schedule (tests/protocol/words.py). Mirrored is what no schedule
says: counters and words inside kernels and the native part, failures on the host, and resets. What whole kernels
store and signal is seen in tests/run/test_kernel_effects.py.
"""

from tests.protocol.mirrors import Mirrors

MIRRORED: Mirrors = {
    "programs.ProgramModel": {
        "kernels/triton/primitives.py": (
            "next_round slot_of end_round report report_all signal_peer signal_peers source_rank all_there wait_all "
            "wait_source flags_of flag_value",
            "814d86b463f2",
        ),
    },
    "words._Rows": {
        "fusedcomm/run/routed_rows.py:BySlots": ("counts send collect _slot _signal _wait", "cd1bb363ea8b"),
    },
    "model.ProtocolModel: calls": {
        "fusedcomm/memory/workspace.py:Workspace": (
            "enter check check_peers signal _must_stop wait breakers end_round handshake",
            "0f119ca08bee",
        ),
        "fusedcomm/run/calls.py": ("run", "43f7828de02b"),
        "kernels/cpu/prepared_calls.h": ("is_broken", "15c2bcec04eb"),
        "kernels/cpu/prepared_calls.cpp": ("run", "b79db9fd5d84"),
        "kernels/cpu/flags.h": ("signal_word wait_word any_broken", "c72019ab72f6"),
        "kernels/cpu/rounds.h": ("signal flag wait slot slot_offset end", "29752478fafa"),
        "kernels/cpu/spin.h": ("again", "c61eb2c3da2e"),
        "kernels/triton/primitives.py": (
            "signal poll_broken is_broken given_up give_up_earlier must_poison next_push",
            "63d867bf7f59",
        ),
        "kernels/triton/ptx.py": ("poll acquired any_thread", "1d7960605c35"),
    },
    "model.ProtocolModel: failures and resets": {
        "fusedcomm/memory/workspace.py:Workspace": ("leave fail guarded abandon _give_up initialise", "fc81ce13b05b"),
        "kernels/triton/primitives.py": ("fail", "5ef040b57d7d"),
        "fusedcomm/memory/members.py": ("_all_members reset", "7bbaabfb1efb"),
        "fusedcomm/memory/group_member.py:Member": (
            "reset _make _allocate _agree _free _come_together",
            "04759fcfd024",
        ),
        "fusedcomm/memory/vote.py": ("agree", "ac0098874c92"),
        "fusedcomm/memory/vote.py:_Vote": ("leave_together", "a581cb9397b0"),
    },
}

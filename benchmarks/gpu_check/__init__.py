"""Everything that one GPU can prove of fusedcomm, in one command that ends inside nine minutes.

    make gpu-check
    python -m benchmarks.gpu_check [--json FILE] [--only PART ...] [--device cpu]

Each part runs in a process of its own under a limit of its own (`parts` has them, in the order of their value), and
each case is reported when it is done. So a case that hangs, crashes or loses the CUDA context costs its own result
alone. ``--device cpu`` rehearses what can run without a GPU, in Triton's interpreter.
"""

"""Proofs and speeds of fusedcomm on one GPU, in two halves that end within 380 seconds each.

    make gpu-check
    python -m fusedcomm.bench.gpu_check [--json FILE] [--only right|fast|PART ...] [--device cpu]

right  values, processes, hardware queues, users' programs, graphs, time-outs
fast   kernels, whole ops, the host's time; every row of `speeds.TABLE` is a line of the summary

It runs from a checkout, whether fusedcomm is installed or not. Each part runs in a process of its own under a limit of
its own (`parts` has them, in the order of their value), and each case is reported when it is done. So a case that
hangs, crashes or loses the CUDA context costs its own result alone. The summary compares with the last committed
results of the same GPU model (bench/results/gpu-*.json). ``--device cpu`` rehearses the cases that need no GPU, in
Triton's interpreter.
"""

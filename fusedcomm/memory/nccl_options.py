"""The NCCL of this torch, and process group options that keep collectives off the GPU's SMs."""

from typing import Any

import torch
import torch.distributed as dist

POLICY = "NCCL_CTA_POLICY_ZERO"


def nccl_options() -> Any:
    """Options of a process group that make NCCL run collectives without SMs where it can, by copy engines and the CPU.

    ``unfused`` and ``pipelined`` call the collectives of the process group. NCCL runs these by kernels that take SMs
    from the matmuls beside them; with its zero-CTA policy, which these options set, it has all_gather and all_to_all
    copied instead, as long as a call fulfils its conditions, and runs kernels as before otherwise. NCCL calls it a
    trade: a collective alone may take longer. Nobody has run fusedcomm with it: it is opt-in, so measure both.

    * torch 2.11 has NCCL 2.28.9, 2.12 with CUDA 13 and 2.13 have 2.29.7: their zero-CTA collectives stay inside a host,
      and collectives across hosts are as without these options. torch 2.14 and newer with CUDA 13 have 2.30.7, the
      first that crosses hosts. `fusedcomm doctor` says which one is installed.
    * The received tensor, and for an all_to_all the sent one too, must lie in memory that NCCL has registered as a
      symmetric window. ``pipelined`` takes ordinary memory of torch's allocator; docs/hosts.md has the lines that
      register it. ``torch.distributed._symmetric_memory.set_backend("NCCL")`` is no way to it here: it is for the whole
      process, and `chunked` and `fused` need torch's CUDA backend.
    * With torch 2.13 and CUDA 13 a rendezvous on that NCCL backend is reported to fail, and in general as the first
      that a group does: pass ``device_id`` to init_process_group, which makes the communicator at once.
    * Only an all_to_all of equal parts is one of NCCL's own; one of unequal parts is sends and receives, by kernels.
      ``pipelined`` pads parts to one size, and to a multiple of 16 bytes; with ``unfused`` this is up to the shapes.
    * The bandwidth of the zero-CTA all_to_all across hosts is reported to fall as hosts are added.

    torch writes into the options that a group is made with, so each group gets an object of its own, and a group does
    not take them from WORLD: pass them to every init_process_group, new_group and, as
    ``backend_override={"tp": ("nccl", fusedcomm.nccl_options())}``, to init_device_mesh. All ranks must do alike.

    Returns:
        a new ``torch.distributed.ProcessGroupNCCL.Options``, otherwise with torch's defaults.

    Raises:
        RuntimeError: this torch has no NCCL, or none with this policy. It is no warning, because a program that asks
            for options of NCCL has no use for others.

    Example, on each rank of a job on GPUs::

        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=device, pg_options=fusedcomm.nccl_options())
        group = dist.new_group(range(16), pg_options=fusedcomm.nccl_options())
    """
    if (reason := no_zero_cta()) is not None:
        raise RuntimeError(f"torch must be a CUDA build with NCCL 2.28 or newer, which has {POLICY}: {reason}")
    backend: Any = dist.ProcessGroupNCCL
    options = backend.Options()
    options.config.cta_policy = backend.NCCL_CTA_POLICY_ZERO
    return options


def no_zero_cta() -> str | None:
    """Why groups of this torch cannot have the zero-CTA policy, or None."""
    backend = getattr(dist, "ProcessGroupNCCL", None)
    if backend is None:
        return f"torch {torch.__version__} has no NCCL"
    if not hasattr(backend, POLICY) or not hasattr(backend.Options().config, "cta_policy"):
        return f"torch {torch.__version__} has NCCL {nccl_version_text()} without it"
    return None


def nccl_version_text() -> str | None:
    """The version of NCCL that torch was built with, None where it was built without."""
    try:
        return ".".join(map(str, torch.cuda.nccl.version()[:3]))
    except (AttributeError, RuntimeError):
        return None

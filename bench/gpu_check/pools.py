"""Ranks in processes of their own that share one device, over torch's symmetric memory and gloo."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from fusedcomm.bench.gpu_check import child
from fusedcomm.launch.ranks import RankError, RankPool
from fusedcomm.memory import topology

ONE_DEVICE = {"LOCAL_RANK": "0"}  # DeviceMesh makes it the current one
LIMIT_S = {"cuda": 55, "cpu": 200}  # for a call of all ranks; Triton's interpreter is slow


class Pools:
    """One pool of ranks at a time. One that has failed is replaced: a rank may have lost its CUDA context."""

    def __init__(self, device: torch.device) -> None:
        self.device_type = device.type
        self.pool: RankPool | None = None
        self.key: tuple[int, Mapping[str, str]] = (0, {})

    def get(self, size: int, env: Mapping[str, str] | None = None) -> RankPool:
        key = (size, env or {})
        if self.pool is None or self.pool.dead or self.key != key:
            self.close()
            limit_s = LIMIT_S[self.device_type]
            self.pool, self.key = RankPool(size, timeout_s=limit_s, env=ONE_DEVICE | dict(key[1])), key
        return self.pool

    def run(self, size: int, fn: Callable[..., Any], *args: Any, env: Mapping[str, str] | None = None) -> Any:
        """Rank 0's result of ``fn(rank, device_type, *args)``, with ``env`` set before torch is imported."""
        pool = self.get(size, env)
        try:
            return pool.run(fn, self.device_type, *args)[0]
        except RankError:
            self.close()
            raise

    def case(
        self, size: int, fn: Callable[..., Any], *args: Any, by_gloo: bool = False, **options: Any
    ) -> Callable[[], Any]:
        """`run` as a case. ``by_gloo``: it needs no symmetric memory."""

        def run() -> Any:
            if not by_gloo:
                self.need_segments()
            return self.run(size, fn, *args, **options)

        return run

    def need_segments(self) -> None:
        """Skip the case if CPU tensors have no symmetric memory: the native part is missing."""
        if self.device_type == "cpu" and (reason := topology.no_native()):
            raise child.Skipped(reason)

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
            self.pool = None

"""Process groups that a test makes in ranks that live on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from fusedcomm.redistribution import mesh_groups


@contextmanager
def left_as_found(**env: str) -> Iterator[pytest.MonkeyPatch]:
    """WORLD is as new inside, under these settings; groups that are made inside are destroyed."""
    before = list(c10d._world.pg_map)
    mesh_groups._worlds.clear()
    mesh_groups._meshes.clear()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(f"FUSEDCOMM_{name}", value)
        try:
            yield patch
        finally:
            for pg in [pg for pg in c10d._world.pg_map if pg not in before]:
                dist.destroy_process_group(pg)
            mesh_groups._worlds.clear()

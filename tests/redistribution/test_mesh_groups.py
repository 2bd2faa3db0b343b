"""Groups of several mesh dims, and the vote at a mesh's first use: right ranks, reused, bounded, the same on all."""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from fusedcomm.launch.ranks import RankPool
from fusedcomm.memory.errors import PeerTimeoutError
from fusedcomm.plan.cost import tuned
from fusedcomm.plan.cost.model import DEFAULTS, TUNED
from fusedcomm.redistribution import mesh_groups
from tests.helpers.groups import left_as_found
from tests.helpers.merge_world import fake_ranks
from tests.helpers.on_ranks import on_ranks

Ranks = Callable[[int], RankPool]
PERMUTED = [[[0, 4], [2, 6]], [[1, 5], [3, 7]]]


def members_of(mesh: Any, mesh_dims: tuple[int, ...], rank: int) -> list[int]:
    """The members of a group in row-major order, found by looking at every coordinate."""
    mesh = np.array(mesh)
    (own,) = np.argwhere(mesh == rank)
    others = set(range(mesh.ndim)) - set(mesh_dims)
    coordinates = [c for c in np.ndindex(*mesh.shape) if all(c[i] == own[i] for i in others)]
    return [int(mesh[c]) for c in sorted(coordinates)]


def gathered(flat: mesh_groups.FlatGroup) -> list[int]:
    own = torch.tensor([dist.get_rank()])
    return torch.ops._c10d_functional.wait_tensor(
        torch.ops._c10d_functional.all_gather_into_tensor(own, flat.pg.size(), flat.group_name)
    ).tolist()


@on_ranks(8)
def test_groups_that_exist_are_used(rank: int) -> None:
    with left_as_found():
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
        flat_mesh = mesh["b", "c"]._flatten("bc")
        mesh["a", "b"]._flatten("ab", backend_override="fake")
        assert mesh_groups.flattened(mesh, (1, 2)).pg is flat_mesh.get_group()
        assert mesh_groups.flattened(mesh["b", "c"], (0, 1)).pg is flat_mesh.get_group()
        assert mesh_groups.flattened(mesh, (0, 1, 2)).pg is dist.group.WORLD
        assert mesh_groups.flattened(mesh, (1,)).pg is mesh.get_group(1)
        thin = DeviceMesh("cpu", [[[0, 3, 5, 6]], [[1, 2, 4, 7]]])
        assert mesh_groups.flattened(thin, (1, 2)).pg is thin.get_group(2)
        real = mesh_groups.flattened(mesh, (0, 1))
        assert dist.get_backend(real.pg) == "gloo", "a group of another backend is no substitute"
        assert gathered(real) == members_of(np.arange(8).reshape(2, 2, 2), (0, 1), rank)
        count = len(c10d._world.pg_map)
        another = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("x", "y", "z"))
        assert mesh_groups.flattened(another, (0, 1)).pg is real.pg
        assert len(c10d._world.pg_map) == count


@on_ranks(8)
def test_ranks_that_have_not_equally_many_groups_find_each_other(rank: int) -> None:
    with left_as_found():
        mesh = DeviceMesh("cpu", [[1, 3], [5, 7]])
        count = c10d._world.group_count
        if rank == 1:
            dist.new_group([1], use_local_synchronization=True)
        if rank % 2 == 0:
            return
        assert gathered(mesh_groups.flattened(mesh, (0, 1))) == [1, 3, 5, 7]
        c10d._world.group_count = count  # torch 2.15 names all later groups by it


@on_ranks(8)
def test_timeouts_are_those_of_the_mesh(rank: int) -> None:
    with left_as_found(TIMEOUT_S="5"):
        mesh = DeviceMesh("cpu", PERMUTED)
        for dim in range(3):
            c10d._set_pg_timeout(timedelta(seconds=77), mesh.get_group(dim))
        backend = mesh_groups.flattened(mesh, (0, 2)).pg._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=77)
        assert not mesh._flatten_mapping, "torch would merge over it, with wrong rows for uneven shards"


# ranks that do not come, or with something else
def absent(rank: int, use: str) -> str | None:
    with left_as_found(TIMEOUT_S="2"):
        mesh = DeviceMesh("cpu", [[1, 3], [5, 7]])
        count, text = len(c10d._world.pg_map), None
        dist.barrier()  # from here on all others have the whole time-out
        if rank % 2 and rank != 5:
            started = time.monotonic()
            with pytest.raises(PeerTimeoutError, match=r"for ranks \[5\], which did not come") as caught:
                mesh_groups.check(mesh) if use == "check" else mesh_groups.flattened(mesh, (0, 1))
            assert time.monotonic() - started < 30
            assert caught.value.peers == [5]
            assert len(c10d._world.pg_map) == count
            text = str(caught.value)
        dist.barrier()
        os.environ["FUSEDCOMM_TIMEOUT_S"] = "20"
        if rank % 2:
            assert mesh_groups.check(mesh).ranks == (1, 3, 5, 7)
            assert gathered(mesh_groups.flattened(mesh, (0, 1))) == [1, 3, 5, 7]
        return text


@pytest.mark.parametrize("use", ["check", pytest.param("flattened", marks=pytest.mark.thorough)])
def test_an_absent_rank_is_named_and_a_later_call_works(ranks: Ranks, use: str) -> None:
    texts = ranks(8).run(absent, use)
    what = {"check": "mesh", "flattened": "group"}[use]
    assert texts[7].splitlines()[0] == f"fusedcomm {what} vote: rank 7 waited 2 s for ranks [5], which did not come"


def two_meshes(rank: int, a: Any, b: Any, dims: list[tuple[int, ...]] | None) -> str:
    """Rank 3 comes with another mesh than the others, or with other dims, and then with the same."""
    with left_as_found():
        meshes = [DeviceMesh("cpu", a), DeviceMesh("cpu", b)]
        if rank not in meshes[0].mesh:
            return ""
        odd = rank == 3
        with pytest.raises(ValueError, match="must be the same on all ranks") as caught:
            mesh_groups.flattened(meshes[odd], dims[odd]) if dims else mesh_groups.check(meshes[odd])
        if dims:
            assert len(gathered(mesh_groups.flattened(meshes[0], dims[0]))) == 4
        else:
            assert mesh_groups.check(meshes[0]).ranks == tuple(np.array(a).reshape(-1).tolist())
        return str(caught.value)


@pytest.mark.parametrize(
    ("a", "b", "dims", "message"),
    [
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]], None, "ranks .* got [0, 1, 2, 3] on rank 0 and [0, 2, 1, 3] on rank 3"),
        ([[0, 1], [2, 3]], [0, 1, 2, 3], None, "mesh_shape .* got [2, 2] on rank 0 and [4] on rank 3"),
        ([[[0, 1], [2, 3]]], [[[0, 1], [2, 3]]], [(1, 2), (0, 1, 2)], "mesh_dims .* [1, 2] on rank 0 and [0, 1, 2]"),
    ],
)
def test_ranks_that_bring_different_meshes_are_told_so(
    ranks: Ranks, a: Any, b: Any, dims: list[tuple[int, ...]] | None, message: str
) -> None:
    texts = ranks(8).run(two_meshes, a, b, dims)[:4]
    assert len(set(texts)) == 1
    start, end = message.split(" .* ")
    assert texts[0].startswith(start) and end in texts[0]


def backend_fails(rank: int) -> str:
    with left_as_found() as patch:
        mesh = DeviceMesh("cpu", [[1, 3], [5, 7]])
        if rank % 2 == 0:
            return ""
        count, original, names = len(c10d._world.pg_map), mesh_groups._new_group, []

        def failing(*args: Any) -> ProcessGroup:
            pg = original(*args)
            names.append(pg.group_name)
            dist.barrier(pg)  # a rank that leaves while others still connect fails them too
            if rank == 5:
                dist.destroy_process_group(pg)
                raise RuntimeError("no sockets left")
            return pg

        patch.setattr(mesh_groups, "_new_group", failing)
        with pytest.raises(RuntimeError, match="rank 5 cannot make a gloo group") as caught:
            mesh_groups.flattened(mesh, (0, 1))
        assert len(c10d._world.pg_map) == count
        patch.undo()
        flat = mesh_groups.flattened(mesh, (0, 1))
        assert gathered(flat) == [1, 3, 5, 7]
        assert flat.group_name not in names, "its rendezvous is still in the store"
        return str(caught.value)


def test_a_backend_that_fails_on_one_rank_fails_on_all(ranks: Ranks) -> None:
    texts = ranks(8).run(backend_fails)
    assert set(texts[1::2]) == {"rank 5 cannot make a gloo group of ranks (1, 3, 5, 7): RuntimeError: no sockets left"}


def lost_between(rank: int) -> float:
    with left_as_found(TIMEOUT_S="2") as patch:
        mesh = DeviceMesh("cpu", [[1, 3], [5, 7]])
        dist.barrier()
        started = time.monotonic()
        if rank == 5:

            def killed(*args: Any) -> ProcessGroup:
                raise SystemExit

            patch.setattr(mesh_groups, "_new_group", killed)
            with pytest.raises(SystemExit):
                mesh_groups.flattened(mesh, (0, 1))
        elif rank % 2:
            with pytest.raises(PeerTimeoutError) as caught:
                mesh_groups.flattened(mesh, (0, 1))
            assert caught.value.peers == [5]
        dist.barrier()
        return time.monotonic() - started


def test_a_rank_lost_after_the_vote_leaves_no_one_waiting(ranks: Ranks) -> None:
    assert max(ranks(8).run(lost_between)) < 60  # gloo's own bound is half an hour


@on_ranks(4)
def test_a_rank_outside_the_mesh_is_told_so(rank: int) -> None:
    with left_as_found():
        mesh = DeviceMesh("cpu", [0, 1])
        if rank < 2:
            assert mesh_groups.check(mesh).ranks == (0, 1)
        else:
            for use in (lambda: mesh_groups.check(mesh), lambda: mesh_groups.flattened(mesh, (0,))):
                with pytest.raises(ValueError, match=rf"must contain this rank, {rank}, got .*\[0, 1\]"):
                    use()


# what ranks tell each other
def hosts(rank: int) -> mesh_groups.MeshFacts:
    with left_as_found(HOST_ID="ab"[rank // 2]):
        return mesh_groups.check(DeviceMesh("cpu", [[2, 0], [3, 1]]))


def test_hosts_are_numbered_in_the_order_of_the_mesh(ranks: Ranks) -> None:
    assert ranks(4).run(hosts) == [mesh_groups.MeshFacts((2, 2), (2, 0, 3, 1), (0, 1, 0, 1), DEFAULTS["cpu"])] * 4


def tuned_on(rank: int, directories: list[str], host: str) -> Any:
    with left_as_found(CACHE_DIR=directories[rank], HOST_ID=host[rank]):
        if rank in (0, 3):
            tuned.write(replace(DEFAULTS["cpu"], source=TUNED), tuned.key(torch.device("cpu"), 4))
        dist.barrier()
        return mesh_groups.check(DeviceMesh("cpu", [0, 1, 2, 3])).constants


@pytest.mark.parametrize("shared, hosts", [(True, "aaaa"), (False, "aaaa"), (True, "aabb")])
def test_tuned_numbers_are_used_by_all_ranks_of_one_host_or_none(
    ranks: Ranks, shared: bool, hosts: str, tmp_path: Any
) -> None:
    directories = [str(tmp_path / ("all" if shared else "ab"[rank == 2])) for rank in range(4)]
    sources = {constants.source for constants in ranks(4).run(tuned_on, directories, hosts)}
    assert sources == ({TUNED} if shared and hosts == "aaaa" else {DEFAULTS["cpu"].source})


# modes, threads, other worlds
class NoOps(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was seen by a mode")


@on_ranks(2)
def test_groups_are_made_while_torch_compile_traces(rank: int) -> None:
    for mode in (FakeTensorMode(), NoOps()):
        with left_as_found() as patch:
            patch.setattr(mesh_groups, "_existing", lambda *_: None)
            mesh = DeviceMesh("cpu", [[1], [0]])
            with mode:
                with pytest.raises(Exception):  # noqa: B017  # without protection it could not even read the mesh
                    mesh.mesh.tolist()
                assert mesh_groups.check(mesh).ranks == (1, 0)
                flat = mesh_groups.flattened(mesh, (0, 1))
            assert flat.order == (1, 0) and flat.group_name.startswith("fusedcomm")
            assert gathered(flat) == [0, 1]


@pytest.mark.nightly
@on_ranks(8)
def test_groups_of_other_ranks_do_not_wait_for_each_other(rank: int) -> None:
    with left_as_found(TIMEOUT_S="90"):  # 16 threads on few cores
        meshes = [DeviceMesh("cpu", PERMUTED), DeviceMesh("cpu", np.arange(8).reshape(2, 2, 2).tolist())]
        found: list[list[Any]] = [[], []]
        threads = []
        for i in (0, 1) if rank % 2 else (1, 0):  # ranks begin with another one: neither may hold the other up

            def use(i: int = i) -> None:
                found[i].append(mesh_groups.flattened(meshes[i], (1, 2)))

            threads.append(threading.Thread(target=use))
            threads[-1].start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        assert [gathered(each[0]) for each in found] == [sorted(members_of(mesh.mesh, (1, 2), rank)) for mesh in meshes]


def test_a_destroyed_mesh_is_named_and_a_new_world_begins_anew() -> None:
    with fake_ranks(8):
        old = init_device_mesh("cpu", (2, 2, 2))
        first = mesh_groups.check(old), mesh_groups.flattened(old, (0, 1)), mesh_groups.flattened(old, (0, 1, 2))
    with pytest.raises(ValueError, match="device_mesh must have its process groups, got DeviceMesh"):
        mesh_groups.check(old)
    with fake_ranks(8):
        with pytest.raises(ValueError, match="groups were destroyed"):
            mesh_groups.flattened(old, (0, 1))
        while len(c10d._world.pg_map) < 20:
            dist.new_group([0, 7])  # under names that those of the old mesh had
        with pytest.raises(ValueError, match="groups were destroyed"):
            mesh_groups.flattened(old, (0, 1))
    with fake_ranks(8):
        new = init_device_mesh("cpu", (2, 2, 2))
        assert new == old
        again = mesh_groups.check(new), mesh_groups.flattened(new, (0, 1)), mesh_groups.flattened(new, (0, 1, 2))
        assert again[0] == first[0]
        assert again[1].pg is not first[1].pg and again[1].pg in c10d._world.pg_map
        assert again[2].pg is dist.group.WORLD
        dist.destroy_process_group(again[1].pg)
        assert mesh_groups.flattened(new, (0, 1)).pg in c10d._world.pg_map
        dist.destroy_process_group(new.get_group(1))
        with pytest.raises(ValueError, match="groups were destroyed"):
            mesh_groups.check(new)


def test_no_group_is_split_from_a_world_that_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's split is a collective of WORLD, with the ranks outside of the group among them."""
    seen, original = [], c10d._new_process_group_helper

    def helper(*args: Any, **kwargs: Any) -> Any:
        seen.append(dist.group.WORLD.bound_device_id)
        return original(*args, **kwargs)

    with fake_ranks(8):
        mesh = init_device_mesh("cpu", (2, 2, 2))
        dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
        monkeypatch.setattr(c10d, "_new_process_group_helper", helper)
        mesh_groups.flattened(mesh, (0, 1))
        assert seen == [None]
        assert dist.group.WORLD.bound_device_id == torch.device("cuda", 0)
        dist.group.WORLD.bound_device_id = None

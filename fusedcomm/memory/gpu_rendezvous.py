"""torch's rendezvous on GPUs, also among ranks that have made different numbers of them.

torch's exchanges have keys in the group's store by a count of the process, not of the group (pytorch issue 196082,
mended in torch 2.15): after an op on ranks [0, 1], those of [0, 1, 2] would wait for each other in vain. Where ranks'
counts differ, or a rendezvous has failed, they meet in a group of another name, in whose store the count begins at 0.
That group has never run on a GPU. Rendezvous that are not fusedcomm's own are not counted.
"""

import hashlib
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore, ProcessGroup, Store
from torch.distributed.distributed_c10d import GroupName

_DISABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_COUNT = re.compile(r"(?<=^CUDASymmetricMemory/)\d+")


class Counter:
    """The rendezvous of this process."""

    def __init__(self) -> None:
        self.begun = self.ended = 0  # they differ for good once one has failed: torch's count is unknown then

    def fact(self) -> str:
        return f"{self.begun} {self.ended} {uuid.uuid4().hex}"


counter = Counter()


def private_name(facts: list[str]) -> str | None:
    """A new name, equal on all ranks, unless all have the same known count. ``facts``: of all ranks, by rank."""
    if len({count for fact in facts for count in fact.split()[:2]}) == 1:
        return None
    return f"fusedcomm/{hashlib.sha256(' '.join(facts).encode()).hexdigest()}"


@contextmanager
def registered(name: str | None, store: Store, rank: int, group_size: int) -> Iterator[None]:
    """torch finds a group of this name inside. Handles need it no more: they find their memory by the name alone.

    It has its own connection to the store, as a rank that is left behind in a wait keeps its connection.
    """
    if name is None:
        yield
        return
    counted = CountedStore(PrefixStore(name, store.clone()))  # type: ignore[attr-defined]
    group = ProcessGroup(counted, rank, group_size)
    custom = ProcessGroup.BackendType.CUSTOM  # torch asks a backend whether to use the store
    group._register_backend(torch.device("cuda"), custom, c10d.FakeProcessGroup._create_internal(rank, group_size))
    group._set_default_backend(custom)
    key = cast(GroupName, name)
    c10d._register_process_group(key, group)
    try:
        yield
    finally:
        c10d._unregister_process_group(key)


@contextmanager
def without_multicast() -> Iterator[None]:
    """torch's rendezvous makes no multicast object inside: nothing here uses one, and it can fail or block.

    torch reads the variable in each rendezvous, of which a process makes one at a time: its socket is named by the pid.
    """
    before = os.environ.get(_DISABLE)
    os.environ[_DISABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_DISABLE]
        else:
            os.environ[_DISABLE] = before


class CountedStore(Store):
    """``store`` with keys in which torch's counts are replaced by 0, 1, ... as they come."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.set_timeout(store.timeout)  # type: ignore[attr-defined]
        self._store = store
        self._counts: dict[str, int] = {}

    def _key(self, key: str) -> str:
        return _COUNT.sub(lambda found: str(self._counts.setdefault(found[0], len(self._counts))), key)

    def set(self, key: str, value: str) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._store.multi_get([self._key(key) for key in keys])

    def add(self, key: str, value: int) -> int:
        return self._store.add(self._key(key), value)

    def check(self, keys: list[str]) -> bool:
        return self._store.check([self._key(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        bound = self.timeout if timeout is None else timeout  # type: ignore[attr-defined]
        self._store.wait([self._key(key) for key in keys], bound)

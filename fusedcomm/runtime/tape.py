"""Records what a call on CPU tensors does, so that `kernels/cpu/tape.h` can do it again without Python.

A tape has the ops of torch that an algorithm runs, and its signals and waits, with each tensor named by where it lies:
in an argument, in what an op on the tape has made, in a slot, or in a peer's result. Views of these are not ops, as a
place has sizes and strides. So a tape stands for all calls with the same sizes, strides, dtypes and other arguments,
and for nothing else. Whether a chunk goes in place or into a slot is decided anew each time: the tape has both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

MOST_ROUNDS = 256  # recording one takes milliseconds
ROUND_BYTES = 50 << 10  # of a tape, at most: 20 to 50 KiB were measured


class Recorder(TorchDispatchMode):
    """A context that runs one call and has its tape. ``arguments``: the call's tensors, with a storage each."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        from fusedcomm.kernels.cpu import native

        self._native = native
        self.tape = native.Tape()
        self.record: Any = None  # the Record of the call, once it is planned
        self.workspace: Any = None  # the Workspace that it runs on
        self.fingerprint = 0
        self.reasons: list[str] = []  # why the tape cannot be used
        self._places: dict[int, tuple[int, int]] = {}  # by storage: kind and index of what lies in it
        self._known: list[StorageWeakRef] = []  # while one refers to a storage, its number names no other
        self._num_rounds = 0
        self._slot = 0  # where the slot of this round begins
        self._starts: dict[int, int] = {}  # where in its storage a peer's result begins
        self._ranks: list[int] = []  # whose chunks have been recorded
        self._dry = False
        self.paused = self.has_given_up = False
        for index, argument in enumerate(arguments):
            self._know(argument, native.ARGUMENT, index)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load Dynamo to keep it out of this mode: more than a second for programs that compile nothing,
        while peers wait.
        """
        return False

    @property
    def num_bytes(self) -> int:
        return max(1, self._num_rounds) * ROUND_BYTES

    @property
    def is_usable(self) -> bool:
        return not self.reasons

    def planned(self, record: Any, workspace: Any, fingerprint: int) -> None:
        """The call runs on ``workspace``, or unfused, without one."""
        self.record, self.workspace, self.fingerprint = record, workspace, fingerprint
        if workspace is not None:
            for rank, segment in enumerate(workspace.buffers):
                self._know(segment, self._native.SLOT, rank)
            for rank, heap in enumerate(workspace.results.buffers if workspace.results else []):
                self._know(heap, self._native.PEER_RESULT, rank)

    def give_up(self, reason: str) -> None:
        """What the call does from here on is on no tape."""
        self.reasons.append(reason)
        self.paused = self.has_given_up = True

    def begin_round(self, slot: int) -> None:
        """``slot``: where it begins in a segment."""
        self._slot = slot

    def end_round(self) -> None:
        self.tape.end_round()
        self._num_rounds += 1
        if self._num_rounds == MOST_ROUNDS:
            self.give_up(f"it has {MOST_ROUNDS} rounds or more, of which a tape would be large")

    def signal(self, dst_rank: int) -> None:
        self.tape.signal(dst_rank)

    def wait(self, src_rank: int) -> None:
        self.tape.wait(src_rank)

    def result(self, out: Tensor, posted: bool) -> None:
        """``out`` was just made for a result of the call. ``posted``: where peers can write it."""
        self.tape.result(self._new(out), list(out.shape), out.dtype, posted)

    def post(self, result: Tensor) -> None:
        self.tape.post(self._operand(result))

    def peer_result(self, dst_rank: int, place: Tensor) -> None:
        """``place`` is, or stands for, what dst_rank takes in place of this rank's result."""
        self._know(place, self._native.PEER_RESULT, dst_rank)
        self._starts[_storage(place)] = int(place.storage_offset()) * place.itemsize

    @contextmanager
    def body(self, dry: bool = False) -> Iterator[None]:
        """What is recorded inside belongs together. ``dry``: nothing that is there already is written."""
        before, self._dry = self._dry, self._dry or dry
        self.tape.begin_body()
        yield
        self.tape.end_body()
        self._dry = before

    @contextmanager
    def chunks(self) -> Iterator[None]:
        self._ranks = []
        yield
        self.tape.chunks(self._ranks)

    @contextmanager
    def chunk(self, dst_rank: int) -> Iterator[None]:
        with self.body():
            yield
        self._ranks.append(dst_rank)

    def either(self, kind: str, rank: int, taken: bool, num_bytes: int) -> Iterator[bool]:
        for answer in (True, False):
            with self.body(dry=answer != taken):
                yield answer
        self.tape.either(kind, rank, num_bytes)

    @contextmanager
    def lane(self, name: str, profiled: AbstractContextManager[Any]) -> Iterator[None]:
        """A lane in each run of the tape. ``profiled``: the range of this call itself."""
        self.tape.enter_lane(name)
        seen = nullcontext() if self._dry else profiled
        with paused():
            seen.__enter__()
        try:
            yield
        finally:
            with paused():
                seen.__exit__(None, None, None)
        self.tape.leave_lane()

    def finish(self, results: Sequence[Any]) -> None:
        """End the tape with the call's results: tensors, or lists of them."""
        operands = [self._operands(each) for each in results]
        if self.is_usable:
            self.tape.finish(operands)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = _given(func, args, kwargs) if self._dry else None
        made = func(*args, **kwargs) if given is None else given
        if self.paused:
            return made
        leaves = [made] if isinstance(made, Tensor) else pytree.tree_leaves(made)
        outs = [out for out in leaves if isinstance(out, Tensor)]
        if len(outs) < len(leaves):
            self.reasons.append(f"{func} gives something other than tensors")
        is_view = func.is_view or func is torch.ops.aten._unsafe_view.default
        if is_view and all(_storage(out) in self._places for out in outs):
            return made  # its place says all; `to` and `reshape` are views that may copy
        operands = self._operands(args), self._operands(kwargs)
        registers = [-1 if _storage(out) in self._places else self._new(out) for out in outs]
        self.tape.op(func._schema.name, func._schema.overload_name, *operands, registers)
        return made

    def _new(self, out: Tensor) -> int:
        register: int = self.tape.new_register()
        self._know(out, self._native.REGISTER, register)
        return register

    def _know(self, t: Tensor, kind: int, index: int) -> None:
        self._known.append(StorageWeakRef(t.untyped_storage()))  # which keeps no memory
        self._places[_storage(t)] = kind, index

    def _operands(self, values: Any) -> Any:
        """``values`` with an Operand in place of each tensor."""
        return pytree.tree_map_only(Tensor, self._operand, values)

    def _operand(self, t: Tensor) -> Any:
        place = self._places.get(_storage(t))
        offset = t.storage_offset() * t.itemsize
        if place is None:
            self.reasons.append(f"a tensor of {list(t.shape)} comes from outside of the call")
            place = self._native.ARGUMENT, 0
        elif place[0] == self._native.SLOT:
            offset -= self._slot
            if offset < 0:
                self.reasons.append("it reads or writes a header")
        elif place[0] == self._native.PEER_RESULT:
            offset -= self._starts[_storage(t)]
        return self._native.Operand(*place, offset, list(t.shape), list(t.stride()), t.dtype)


def _storage(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def recorder() -> Recorder | None:
    """The Recorder of the call that this thread runs, if there is one."""
    mode = _get_current_dispatch_mode()
    return mode if isinstance(mode, Recorder) and not mode.has_given_up else None


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The argument that an op writes, if it writes one."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found: Tensor = args[i] if i < len(args) else kwargs[argument.name]
            return found
    return None


@contextmanager
def paused() -> Iterator[None]:
    """What runs inside is part of the protocol, and on no tape."""
    found = recorder()
    if found is None:
        yield
        return
    before, found.paused = found.paused, True
    try:
        yield
    finally:
        found.paused = before


def is_result(out: Tensor, posted: bool) -> None:
    """``out`` was just made for a result of the call. ``posted``: where peers can write it."""
    if (found := recorder()) is not None:
        found.result(out, posted)


def chunks() -> AbstractContextManager[None]:
    """A context around the chunks that are sent in a round, whose order may be another one each time."""
    found = recorder()
    return nullcontext() if found is None else found.chunks()


def chunk(dst_rank: int) -> AbstractContextManager[None]:
    """A context around what makes and sends one of them."""
    found = recorder()
    return nullcontext() if found is None else found.chunk(dst_rank)


def either(kind: str, rank: int, taken: bool, num_bytes: int | None) -> Iterator[bool]:
    """Yields ``taken``: whether a chunk is in place and not in a slot. While a call is recorded, it yields both.

    ``kind``: "placed" for a chunk of this rank in dst_rank's result, "arrived" for one of src_rank in the own result. A
    tape decides anew each time. ``num_bytes``: of that result; None where nothing can be in place.
    """
    found = recorder()
    if found is None or num_bytes is None:
        yield taken
    else:
        yield from found.either(kind, rank, taken, num_bytes)


def stand_in(dst_rank: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Memory for the branch that is recorded without effect."""
    found = recorder()
    assert found is not None
    with paused():
        place = torch.empty(numel, dtype=dtype, device="cpu")
    found.peer_result(dst_rank, place)
    return place


def is_placed(dst_rank: int, place: Tensor) -> None:
    if (found := recorder()) is not None:
        found.peer_result(dst_rank, place)

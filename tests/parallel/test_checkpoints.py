"""Checkpoints of models under the styles: loaded by other numbers of ranks, and exchanged with torch's styles.

What one process holds after the same training is the oracle.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor.parallel as torch_parallel
from torch import nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fusedcomm.parallel
from tests.helpers.groups import left_as_found
from tests.helpers.on_ranks import on_ranks
from tests.helpers.small_llama import CLOSE, llama, meshes, parallelize, plain, sgd, shard, train, whole

STYLES = {"torch": torch_parallel, "ours": fusedcomm.parallel}
STEPS = 3  # the first is before the checkpoint


class Saved:
    """A model and its optimizer, as dcp takes what knows how to give and take its state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = states.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        states.set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )


@contextmanager
def started(styles: str, sizes: tuple[int, ...], seed: int = 0) -> Iterator[tuple[Saved, dict[str, Any]]]:
    """A model under these styles on a mesh, (tensor,) or (data, tensor), and the arguments of `train`."""
    model = llama(seed=seed)
    if len(sizes) == 1:
        parallelize(model, init_device_mesh("cpu", sizes), STYLES[styles])
        yield Saved(model, sgd(model.parameters())), {}
    else:
        with meshes(*sizes) as (data, tensor):
            shard(parallelize(model, tensor, STYLES[styles]), data)
            yield Saved(model, sgd(model.parameters())), {"data": data}


def first_step(rank: int, folder: str, styles: str, sizes: tuple[int, ...], asynchronous: bool = False) -> None:
    with started(styles, sizes) as (saved, arguments):
        train(saved.model, optimizer=saved.optimizer, steps=range(1), **arguments)
        state = {"all": saved}
        if not asynchronous:
            dcp.save(state, checkpoint_id=folder)
            return
        with left_as_found():  # its thread needs a group of its own
            writing = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group())
            train(saved.model, optimizer=saved.optimizer, steps=range(1, 2), **arguments)  # while it is written
            writing.result()  # type: ignore[union-attr]


def other_steps(rank: int, folder: str, styles: str, sizes: tuple[int, ...]) -> None:
    """The losses, norms and weights of training that was never interrupted, from parameters that were others."""
    with started(styles, sizes, seed=1) as (saved, arguments):
        state = {"all": saved}
        dcp.load(state, checkpoint_id=folder)
        run = train(saved.model, optimizer=saved.optimizer, steps=range(1, STEPS), **arguments)
    want = plain(steps=STEPS)
    assert run.losses == pytest.approx(want.losses[1:], rel=CLOSE)
    assert run.norms == pytest.approx(want.norms[1:], rel=CLOSE)
    for name, parameter in run.parameters.items():
        assert (parameter - want.parameters[name]).norm() <= CLOSE * want.parameters[name].norm(), name


def one_process(rank: int, folder: str) -> None:
    """The other steps without any parallelism: the plain model reads the same keys."""
    model = llama(seed=1)
    saved = Saved(model, sgd(model.parameters()))
    dcp.load({"all": saved}, checkpoint_id=folder, no_dist=True)
    run = train(model, optimizer=saved.optimizer, steps=range(1, STEPS))
    assert run.losses == pytest.approx(plain(steps=STEPS).losses[1:], rel=CLOSE)


def size_of(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()


ROUTES = [
    ("ours", (2,), "ours", (2,)),
    pytest.param("torch", (2, 2), "ours", (4,), marks=pytest.mark.thorough),
    *(
        pytest.param(*route, marks=pytest.mark.nightly)
        for route in (
            ("ours", (2,), "ours", (2, 2)),
            ("ours", (2, 2), "ours", (2,)),
            ("ours", (2, 2), "ours", (4, 1)),
            ("ours", (4,), "torch", (2, 2)),
        )
    ),
]


@pytest.mark.parametrize(("before", "sizes", "after", "new_sizes"), ROUTES)
def test_resuming(
    ranks: Any, tmp_path: Path, before: str, sizes: tuple[int, ...], after: str, new_sizes: tuple[int, ...]
) -> None:
    ranks(size_of(sizes)).run(first_step, str(tmp_path), before, sizes)
    ranks(size_of(new_sizes)).run(other_steps, str(tmp_path), after, new_sizes)


@pytest.mark.nightly
def test_resuming_on_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(4).run(first_step, str(tmp_path), "ours", (2, 2))
    ranks(1).run(one_process, str(tmp_path))


@pytest.mark.thorough
def test_asynchronous_save(ranks: Any, tmp_path: Path) -> None:
    """What is saved is what was there at the call, though training goes on."""
    ranks(2).run(first_step, str(tmp_path), "ours", (2,), True)
    ranks(2).run(other_steps, str(tmp_path), "ours", (2,))


@on_ranks(2)
def test_keys_and_placements_are_those_of_torch(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    stock, ours = (parallelize(llama(), mesh, styles).state_dict() for styles in STYLES.values())
    assert list(stock) == list(ours) == list(llama().state_dict())
    for name, tensor in stock.items():
        other = ours[name]
        assert isinstance(tensor, DTensor) and isinstance(other, DTensor)
        assert (other.placements, other.device_mesh, other.shape) == (tensor.placements, mesh, tensor.shape), name
        assert torch.equal(other.to_local(), tensor.to_local())


@on_ranks(2)
def test_whole_state_dicts(rank: int) -> None:
    """Out of a sharded model into a plain one, and back into a sharded one, of rank 0 alone."""
    mesh = init_device_mesh("cpu", (2,))
    model = parallelize(llama(), mesh)
    train(model, steps=range(1))
    options = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = states.get_model_state_dict(model, options=options)
    assert bool(state) == (rank == 0)
    if rank == 0:
        one = llama(seed=1)
        one.load_state_dict(state)
        for name, want in plain(steps=1).parameters.items():
            assert (one.get_parameter(name) - want).norm() <= CLOSE * want.norm(), name
    other = parallelize(llama(seed=1), mesh)
    options = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    states.set_model_state_dict(other, state, options=options)
    for name, parameter in other.named_parameters():
        assert torch.equal(whole(parameter), whole(model.get_parameter(name))), name

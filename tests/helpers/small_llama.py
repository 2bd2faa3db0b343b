"""A small Llama as users write it, its plan of tensor parallelism, and training to compare with one process."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

import fusedcomm.parallel
from tests.helpers.groups import left_as_found

VOCAB, WIDTH, HEADS, KV_HEADS, TOKENS, BATCH, LAYERS = 64, 32, 8, 4, 16, 4, 2
HEAD_DIM = WIDTH // HEADS
CLOSE = 1e-6  # relative; float32 has 1.2e-7, and torch's own styles are 6e-7 away


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(WIDTH, WIDTH)
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * HEAD_DIM, bias=False) for _ in range(2))
        self.wo = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for y in (self.wq(x), self.wk(x), self.wv(x)))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(heads.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.around: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.layers:
            x = self.around(block, x)
        return self.head(self.norm(x))


def llama(dtype: torch.dtype = torch.float32, seed: int = 0) -> Llama:
    torch.manual_seed(seed)
    return Llama().to(dtype)


_numbers = itertools.count()


@contextmanager
def meshes(*sizes: int) -> Iterator[tuple[DeviceMesh, DeviceMesh]]:
    """A mesh of data parallelism, 2-D if there are three sizes, and one of tensor parallelism."""
    number = next(_numbers)  # DTensor takes meshes of one name for one, though the groups of the first are gone
    names = tuple(f"{name}_{number}" for name in ("replicate", "shard", "tensor")[-len(sizes) :])
    with left_as_found():
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        yield mesh[names[:-1]], mesh[names[-1]]


def parallelize(model: Llama, mesh: DeviceMesh, styles: Any = fusedcomm.parallel) -> Llama:
    """The plan of PyTorch's tutorial, sequence parallel, with the styles of either package."""
    column, row, norm = styles.ColwiseParallel, styles.RowwiseParallel, styles.SequenceParallel
    whole = styles.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    ends = {
        "embedding": row(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": norm(),
        "head": column(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    block = {
        "attention_norm": norm(),
        "attention": whole,
        "attention.wq": column(),
        "attention.wk": column(),
        "attention.wv": column(),
        "attention.wo": row(output_layouts=Shard(1)),
        "ffn_norm": norm(),
        "feed_forward": whole,
        "feed_forward.w1": column(),
        "feed_forward.w3": column(),
        "feed_forward.w2": row(output_layouts=Shard(1)),
    }
    styles.parallelize_module(model, mesh, ends)
    for each in model.layers:
        styles.parallelize_module(each, mesh, block)
    return model


def shard(model: Llama, mesh: DeviceMesh, **options: Any) -> Llama:
    """FSDP2 of each block, and of what is left."""
    for block in model.layers:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def batch_of(step: int) -> Tensor:
    """[batch, tokens + 1], of all ranks. There are two, so that losses fall."""
    return torch.randint(VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step % 2))


def loss_of(model: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def lay_out_gradients(model: nn.Module) -> None:
    """Gradients like their parameters, as docs/parallel.md says: `SequenceParallel` leaves partial sums, which torch
    2.11 does not clip, and from 2.14 on what an optimizer makes of them cannot be saved."""
    for parameter in model.parameters():
        grad = parameter.grad
        if isinstance(parameter, DTensor) and isinstance(grad, DTensor) and grad.placements != parameter.placements:
            parameter.grad = grad.redistribute(placements=parameter.placements)


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


# Earlier ones neither clip nor step gradients that are partial sums.
TAKES_PARTIAL_SUMS = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 12)


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def plain_name(name: str) -> str:
    """Without what the wrappers of torch.compile, checkpointing and data parallelism put into it."""
    parts = (".", "_orig_mod", "_checkpoint_wrapped_module", "module")
    return ".".join(part for part in name.split(".") if part not in parts)


@dataclass
class Run:
    """What training gave: losses over the whole batch, norms before clipping, the first gradients, the parameters."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def train(
    model: nn.Module,
    *,
    called: Callable[[Tensor], Tensor] | None = None,
    data: DeviceMesh | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    steps: Sequence[int] = range(3),
    pieces: int = 1,
    before_piece: Callable[[bool], AbstractContextManager[None]] | None = None,
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
    max_norm: float | None = 1.0,
    laid_out: bool = True,
) -> Run:
    """Train ``called``, by default the model itself. ``data``: the mesh over which batches are split, 1-D.

    ``pieces``: microbatches of a batch; ``before_piece``: a context around one, given whether it is the last.
    ``max_norm``: None where gradients of two kinds have no common norm. ``laid_out``: they are before they are clipped.
    """
    called, optimizer, run = model if called is None else called, optimizer or sgd(model.parameters()), Run()
    names = [plain_name(name) for name, _ in model.named_parameters()]
    for step in steps:
        batch = batch_of(step) if data is None else batch_of(step).chunk(data.size())[data.get_local_rank()]
        total = torch.zeros(())
        for i, piece in enumerate(batch.chunk(pieces)):
            with before_piece(i == pieces - 1) if before_piece else nullcontext():
                with around_forward():
                    loss = loss_of(called, piece) / pieces
                loss.backward()
            total += whole(loss)
        if data is not None:
            dist.all_reduce(total, group=data.get_group())
            total /= data.size()
        gradients = [p.grad for p in model.parameters()]
        assert all(g is not None for g in gradients)
        if not run.gradients:
            run.gradients = {name: whole(g) for name, g in zip(names, gradients, strict=True)}
        if laid_out:
            lay_out_gradients(model)
        run.losses.append(total.item())
        if max_norm is not None:
            run.norms.append(whole(nn.utils.clip_grad_norm_(model.parameters(), max_norm)).item())
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {name: whole(p) for name, p in zip(names, model.parameters(), strict=True)}
    return run


@functools.cache
def plain(make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = sgd, steps: int = 3) -> Run:
    """The oracle: the same training in one process."""
    model = llama()
    return train(model, optimizer=make_optimizer(model.parameters()), steps=range(steps))


def difference(got: Run, want: Run) -> float:
    """The largest relative difference, of a tensor as a whole."""
    assert got.gradients.keys() == want.gradients.keys()
    assert len(got.losses) == len(want.losses)
    numbers = [*zip(got.losses, want.losses, strict=True), *zip(got.norms, want.norms, strict=True)]
    pairs = [(torch.tensor(one), torch.tensor(other)) for one, other in numbers]
    pairs += [(each, want.gradients[name]) for name, each in got.gradients.items()]
    pairs += [(each, want.parameters[name]) for name, each in got.parameters.items()]
    return max(((one.double() - other.double()).norm() / other.double().norm()).item() for one, other in pairs)


def check(run: Run) -> None:
    """The run is the plain one, and every rank has the very same losses and norms."""
    assert difference(run, plain()) <= CLOSE
    agree(run)


def agree(run: Run) -> None:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (run.losses, run.norms))
    assert all(each == everyone[0] for each in everyone), f"ranks differ: {everyone}"


def by_ops(model: nn.Module) -> bool:
    """Whether all linear layers ran ops in their last calls."""
    ran = fusedcomm.parallel.explain_layers(model).values()
    return len(ran) == 7 * LAYERS + 1 and not any(why.startswith(("torch's own", "not called")) for why in ran)

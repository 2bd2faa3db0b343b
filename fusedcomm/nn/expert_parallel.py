"""A mixture of experts whose experts lie on the ranks of a group."""

from contextlib import nullcontext
from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional as F

from fusedcomm.memory.captures import is_capturing
from fusedcomm.memory.group import Group, rank_of, resolve
from fusedcomm.ops.call_check import is_traced
from fusedcomm.ops.moe import dispatch_grouped_matmul, grouped_matmul_combine, require


class ExpertParallel(nn.Module):
    """SwiGLU experts in equal blocks over R ranks: the sum of scores * (silu(x @ w1.T) * (x @ w3.T)) @ w2.T.

    Each weight holds this rank's experts, so a state dict of all experts loads as ``w.chunk(R)[rank]``. Weights may be
    made DTensors sharded in dim 0, as `full_state_dict` and torch.distributed.checkpoint need them. Their gradients are
    the sums over the tokens of all ranks, while an average over ranks divides those of replicated parameters by R.

    Args:
        dim: H.
        hidden_dim: F.
        num_experts: E, a multiple of R.
        group: a ProcessGroup, a 1-D DeviceMesh, (DeviceMesh, mesh_dim), a group name, or None for WORLD.
        capacity: rows that each rank receives at most, as in `moe_dispatch`. None: enough for max_tokens whatever the
            routing, up to R times what balanced routing needs, in memory and in the experts' work.
        max_tokens: the most tokens of any rank; capacity=None needs it.
        shared_expert: a module; its result for x is added. On GPUs it runs on a stream of its own from the dispatch on,
            but in compiled code and CUDA graphs.
        device: of the weights.
        dtype: of the weights.

    Attributes:
        w1: [E / R, F, H].
        w2: [E / R, H, F].
        w3: [E / R, F, H].

    Example, on each of 2 ranks::

        layer = fusedcomm.nn.ExpertParallel(8, 16, num_experts=4, max_tokens=5)
        x = torch.randn(5, 8)
        scores, expert_ids = torch.randn(5, 4).softmax(-1).topk(2)
        assert layer(x, expert_ids, scores).shape == x.shape
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        group: Group = None,
        *,
        capacity: int | None = None,
        max_tokens: int | None = None,
        shared_expert: nn.Module | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.capacity, self.max_tokens = num_experts, capacity, max_tokens
        self.group_size, self.group_name = resolve(group)
        require(num_experts % self.group_size == 0, "num_experts", "a multiple of group_size", num_experts)
        own = num_experts // self.group_size
        self.w1 = nn.Parameter(torch.empty(own, hidden_dim, dim, device=device, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(own, dim, hidden_dim, device=device, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty_like(self.w1))
        self.shared_expert = shared_expert
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw each expert's weights as nn.Linear does. Every rank draws those of all, so all need the same seed."""
        for w, own in zip((self.w1, self.w2, self.w3), self._weights(), strict=True):
            drawn, bound = torch.empty(w.shape[1:], device=w.device, dtype=w.dtype), w.shape[2] ** -0.5
            first, *starts = _offset(w)
            if len(w) < self.num_experts:  # of this rank
                first += rank_of(self.group_name) * len(w)
            part = tuple(slice(start, start + size) for start, size in zip(starts, own.shape[1:], strict=True))
            for expert in range(self.num_experts):
                drawn.uniform_(-bound, bound)
                if 0 <= expert - first < len(own):
                    own[expert - first] = drawn[part]

    def forward(self, x: Tensor, expert_ids: Tensor, scores: Tensor) -> Tensor:
        """Compute the experts of each token.

        Args:
            x: [..., H]; the number of tokens may differ between ranks, and be 0.
            expert_ids: [..., k], int32 or int64; -1 for a choice without an expert.
            scores: [..., k], floating.

        Returns:
            [..., H].
        """
        w1, w2, w3 = (w.mT for w in self._weights())
        beside = None if self.shared_expert is None else _stream_beside(x)
        if beside is not None:
            beside.wait_stream(torch.cuda.current_stream(x.device))
        facts = self.num_experts, self.capacity, self.group_name
        (gate, up), _, routing = dispatch_grouped_matmul(x, expert_ids, [w1, w3], *facts, max_tokens=self.max_tokens)
        shared = None
        if self.shared_expert is not None:  # behind the dispatch in the host's order, which starts first
            with nullcontext() if beside is None else torch.cuda.stream(beside):
                shared = self.shared_expert(x)
        y = grouped_matmul_combine(F.silu(gate) * up, w2, routing, scores, self.group_name)
        if shared is None:
            return y
        if beside is not None:
            stream = torch.cuda.current_stream(x.device)
            stream.wait_stream(beside)
            x.record_stream(beside)  # a backward on that stream may be the last to read it
            shared.record_stream(stream)
        return y + shared

    def extra_repr(self) -> str:
        _, hidden_dim, dim = self.w1.shape
        sizes = f"dim={dim}, hidden_dim={hidden_dim}, num_experts={self.num_experts}"
        return f"{sizes}, capacity={self.capacity}, max_tokens={self.max_tokens}, group_size={self.group_size}"

    def _weights(self) -> list[Tensor]:
        """This rank's w1, w2, w3."""
        return [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]


def _offset(w: Tensor) -> tuple[int, ...]:
    """Index of the first element that this process has of a DTensor."""
    if not isinstance(w, DTensor):
        return (0,) * w.ndim
    return compute_local_shape_and_global_offset(w.shape, w.device_mesh, w.placements)[1]


def _stream_beside(x: Tensor) -> torch.cuda.Stream | None:
    """None on CPUs, where there is none; in traced code; and in captures, where nothing orders calls on two streams."""
    return _stream(x.device) if x.is_cuda and not is_traced(x) and not is_capturing(x.device) else None


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)

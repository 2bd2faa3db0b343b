"""The order of a scheduled graph in the code that Inductor generates, and what still fuses; the pass among others."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node

from fusedcomm.compile.overlap import inductor_order
from tests.compile.test_lowering import codes_of
from tests.helpers.graphs import cache_counts

_c10d = torch.ops._c10d_functional
CALL = re.compile(r"_c10d_functional\.(\w+)\.\w+\(|extern_kernels\.(\w*mm)\(|^ +(cpp_fused)\w*\(", re.MULTILINE)


def calls(code: str) -> list[str]:
    """What the code does, in order: "start", "wait", "mm" for any matmul, "fused" for a kernel of pointwise ops."""
    names = [next(filter(None, match)) for match in CALL.findall(code)]
    short = {"wait_tensor": "wait", "mm": "mm", "addmm": "mm", "bmm": "mm", "cpp_fused": "fused"}
    return [short.get(name, "start") for name in names]


def wait_late(graph: Graph, keep: bool) -> None:
    """The order by hand: starts stay; waits, and all that reads them, come last."""
    late: set[Node] = set()
    output = next(iter(graph.find_nodes(op="output")))
    for node in list(graph.nodes):
        waits = node.target is _c10d.wait_tensor.default or late.intersection(node.all_input_nodes)
        if waits and node is not output:
            late.add(node)
            output.prepend(node)
    if keep:
        inductor_order.mark(graph)


def matmuls_between(names: list[str]) -> list[int]:
    """How many matmuls stand between each start and its wait, where waits come in the order of the starts."""
    names = names[names.index("start") :]  # a graph that ranks agreed on waits for the comparison first
    starts, waits = ([i for i, name in enumerate(names) if name == what] for what in ("start", "wait"))
    return [names[start:wait].count("mm") for start, wait in zip(starts, waits, strict=True)]


def gather_beside_matmuls(x: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    group_name = dist.group.WORLD.group_name
    a = x.relu()
    top = u.amax(-1, keepdim=True)
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(w, 2, group_name))
    y = a @ w
    e = (u - top).exp()
    y = (y + 1) @ w
    return y, x + gathered[:8], e / e.sum(-1, keepdim=True)


def check_fusing(rank: int) -> list[tuple[list[str], list[int]]]:
    args = [torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)] + [torch.randn(4, 7, 9)]
    want, found = gather_beside_matmuls(*args), []
    sizes: list[int] = []

    def look(nodes: list[Any]) -> list[Any]:
        sizes[:] = sorted(len(node.get_nodes()) for node in nodes if not inductor_order._is_whole(node))
        return nodes

    for keep in (True, False):
        settings = {
            "post_grad_custom_pre_pass": partial(wait_late, keep=keep),
            "_pre_fusion_custom_pass": inductor_order.KeepOrder(None),
            "_post_fusion_custom_pass": look,
        }
        got, (code,) = codes_of(lambda compiled: compiled(*args), gather_beside_matmuls, **settings)
        torch.testing.assert_close(got, want)
        found.append((calls(code), list(sizes)))
    return found


@pytest.mark.thorough
def test_what_fuses_leaves_the_others_in_place(ranks: Any) -> None:
    """The softmax of u is one kernel, though matmuls stand between its ops. What reads the wait's result is not fused
    with what the first matmul reads; in the control it is, and the wait comes before all matmuls."""
    (kept, lost), other = ranks(2).run(check_fusing)
    assert other == [kept, lost]
    assert matmuls_between(kept[0]) == [2] and matmuls_between(lost[0]) == [0]
    assert kept[1] == [1, 1, 1, 4] and lost[1] == [1, 2, 4]


def theirs(nodes: list[Any]) -> list[Any]:
    return nodes


class Theirs(inductor_order._Base):  # type: ignore[misc]
    def __call__(self, nodes: list[Any]) -> list[Any]:
        return nodes

    def uuid(self) -> Any:
        return "theirs"


@pytest.fixture
def config() -> Iterator[Any]:
    from torch._inductor import config

    with config.patch(_pre_fusion_custom_pass=None):
        yield config
        inductor_order.remove()


@pytest.mark.parametrize("before", [None, theirs, Theirs()], ids=["none", "function", "pass"])
def test_what_was_set_before_runs_and_comes_back(config: Any, before: Any) -> None:
    config._pre_fusion_custom_pass = before
    settings = config.save_config_portable()
    inductor_order.install()
    inductor_order.install()  # again changes nothing
    ours = config._pre_fusion_custom_pass
    assert isinstance(ours, inductor_order.KeepOrder) == (before is not theirs)
    for each in (ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert each([]) == []
    inductor_order.remove()
    assert config._pre_fusion_custom_pass is before
    assert config.save_config_portable() == settings
    inductor_order.remove()
    assert config._pre_fusion_custom_pass is before


def test_a_pass_set_since_stays(config: Any) -> None:
    inductor_order.install()
    config._pre_fusion_custom_pass = theirs
    inductor_order.remove()
    assert config._pre_fusion_custom_pass is theirs


def outcomes(tag: Path, before: Any) -> tuple[int, int, int]:
    from torch._inductor import config

    def run() -> None:
        inductor_order.install()
        torch.compile(lambda x: x @ x)(torch.ones(3, 3))  # nothing to build
        inductor_order.remove()

    with config.patch(_pre_fusion_custom_pass=before):
        return cache_counts(str(tag), run)


def test_cached_graphs(tmp_path: Path) -> None:
    """The cache is used, with other entries for each pass that runs before, and not where that pass has no uuid."""
    assert [outcomes(tmp_path, None) for _ in range(2)] == [(0, 1, 0), (1, 0, 0)]
    assert [outcomes(tmp_path, Theirs()) for _ in range(2)] == [(0, 1, 0), (1, 0, 0)]
    assert outcomes(tmp_path, theirs) == (0, 0, 1)

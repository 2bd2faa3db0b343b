"""Runs cells in pools of ranks. Most of a cell's time is waiting, so several pools work at a time.

A killed rank is not replaced: a pool starts with a few more ranks than a cell needs, and ends when too few are left.
"""

import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import nullcontext
from pathlib import Path

from fusedcomm.launch.ranks import RankError, RankPool
from tests.faults.cells import Cell
from tests.faults.injections import EARLY_S, LATE
from tests.faults.judge import RankReport, Verdict, judge
from tests.faults.rank import Around, run_in_rank

WORKERS = 6
STOPPED = ("pause", "stop", "kill")  # faults whose victim stops itself, until this process ends it or lets it go on
MOST_RANKS = 3  # the most that a cell needs
MOST_KILLS = 3  # kills in a pool, which has as many spare ranks
CELL_S = 90.0  # bound of a cell: one that takes longer hangs
STOP_S = 30.0  # how long the victim may take to come to its step


def run_cells(
    cells: Sequence[Cell],
    *,
    workers: int = WORKERS,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    around: Around = nullcontext,
    cell_s: float = CELL_S,
) -> list[Verdict]:
    """The verdicts, in the order of ``cells``; ``around``: a context in which ranks run a cell."""
    kills = sum(cell.fault == "kill" for cell in cells)
    num_ranks = MOST_RANKS + min(MOST_KILLS, -(-kills // workers))
    left = deque(cells)
    verdicts: dict[Cell, Verdict] = {}
    pools: list[RankPool] = []

    def ranks() -> _Ranks:
        made = _Ranks(num_ranks, cache)
        pools.append(made.pool)
        return made

    def serve(ranks: _Ranks) -> None:
        with ranks.pool as pool:
            while left and not pool.dead and len(ranks.living) >= MOST_RANKS:
                try:
                    cell = left.popleft()
                except IndexError:  # another worker was faster
                    return
                verdicts[cell] = _run_cell(ranks, cell, around, cell_s)
                on_verdict(verdicts[cell])

    with tempfile.TemporaryDirectory(prefix="fusedcomm-faults-") as cache, ThreadPoolExecutor(workers) as executor:
        try:
            serving = {executor.submit(serve, ranks()) for _ in range(min(workers, len(cells)))}
            while serving:
                done, serving = wait(serving, return_when=FIRST_COMPLETED)
                for each in done:
                    each.result()
                    if left:
                        serving.add(executor.submit(serve, ranks()))
        except BaseException:  # a worker's, Ctrl-C or SIGTERM: the executor waits for the running cells only
            left.clear()
            for pool in pools:
                for rank in range(pool.world_size):
                    pool.kill(rank)
            raise
    return [verdicts[cell] for cell in cells]


class _Ranks:
    def __init__(self, num_ranks: int, cache: str) -> None:
        env = {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1", "FUSEDCOMM_CACHE_DIR": cache}
        self.pool = RankPool(num_ranks, env=env, timeout_s=CELL_S)
        self.living = list(range(num_ranks))

    def kill(self, rank: int) -> None:
        self.pool.kill(rank)
        self.living.remove(rank)


def _run_cell(ranks: _Ranks, cell: Cell, around: Around, cell_s: float) -> Verdict:
    members = [*ranks.living[: cell.group_size - 1], ranks.living[-1]]
    ranks.pool.start(run_in_rank, cell, members, around)
    stopped = cell.fault not in STOPPED or _stop(ranks, members[cell.victim], cell)
    try:
        answers = ranks.pool.join(cell_s)
    except RankError as error:
        ranks.pool.close()
        silent = any(failure.kind == "did not answer" for failure in error.failures)
        return Verdict(str(cell), survived=False, hung=silent, found=(str(error),))
    if not stopped:
        return Verdict(str(cell), survived=False, found=(f"the victim did not come to step {cell.step}",))
    reports = [answer for answer in answers if isinstance(answer, RankReport)]
    return judge(cell, {report.rank: report for report in reports})


def _stop(ranks: _Ranks, rank: int, cell: Cell) -> bool:
    """When the victim has stopped itself, end it or let it go on. Returns whether it has stopped."""
    deadline = time.monotonic() + STOP_S
    while not _is_stopped(ranks.pool.pid(rank)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    if cell.fault == "kill":
        ranks.kill(rank)
        return True
    time.sleep(EARLY_S if cell.fault == "pause" else LATE * cell.timeout_s)
    os.kill(ranks.pool.pid(rank), signal.SIGCONT)
    return True


def _is_stopped(pid: int) -> bool:
    """Whether Linux says that the process is stopped. Other systems have no symmetric memory on CPUs."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

"""Instructions that Triton has no words for, and what the interpreter does in their place."""

import time

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import globaltimer
from triton.language.target_info import cuda_capability_geq

INTERPRET = tl.constexpr(knobs.runtime.interpret)

if knobs.runtime.interpret:

    def clock_ns() -> int:
        time.sleep(0)  # ranks may share a core: let the one run that this one waits for
        return time.monotonic_ns()

else:
    clock_ns = globaltimer


@triton.jit
def _execute(INSTRUCTION: tl.constexpr):
    """An instruction without operands, by every thread. ``INSTRUCTION`` gives 0, as Triton wants a result."""
    if not INTERPRET:
        tl.inline_asm_elementwise(INSTRUCTION, "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def block_barrier():
    """Barrier of all threads of a program. It orders their earlier writes for the block.

    Triton does not pipeline loops that hold a tl.debug_barrier, and a persistent loop must hold
    one. Only kernels without warp specialization may use this: barrier 0 takes all threads.
    """
    _execute("bar.sync 0; mov.b32 $0, 0;")


@triton.jit
def fence_generic_writes():
    """Behind a wait, and before TMA loads: they see the sender's writes before its signal.

    Peers write by ordinary stores and copies (the generic proxy), and TMA loads belong to the async proxy. Their order
    is established only by a proxy fence on the path from the store over the release and the acquire to the load. Here
    every thread executes one behind the barrier that ends `wait`, so the thread that issues a load does. It has no
    scope: the path's is the system, by the flag. TMA reads global memory.
    """
    _execute("fence.proxy.async.global; mov.b32 $0, 0;")


@triton.jit
def back_off():
    """Pause between two polls: many programs wait, and each of their polls goes to memory that peers write to."""
    _execute("nanosleep.u32 64; mov.b32 $0, 0;")


@triton.jit
def poll(ptrs, mask=None):
    """Acquire words at system scope by a read-modify-write that changes nothing; every thread gets the same values."""
    return tl.atomic_add(ptrs, tl.cast(0, tl.int64), mask=mask, sem="acquire", scope="sys")


@triton.jit
def acquired(ptr, COUNT: tl.constexpr, other):
    """COUNT words, acquired at system scope, each by one thread, for `any_thread`; the other threads get ``other``.

    Atomics of all programs would queue up where peers write. The interpreter gives a block.
    """
    tl.static_assert(COUNT <= 32)  # threads of the smallest kernels
    if INTERPRET:
        steps = tl.arange(0, triton.next_power_of_2(COUNT))
        words = tl.where(steps < COUNT, poll(ptr + steps, steps < COUNT), other)
    else:
        words = tl.inline_asm_elementwise(
            """{
            .reg .pred taken;
            .reg .b32 thread;
            .reg .b64 at, found;
            mov.u32 thread, %tid.x;
            setp.lt.u32 taken, thread, $2;
            mad.wide.u32 at, thread, 8, $1;
            mov.b64 found, $3;
            @taken ld.acquire.sys.global.b64 found, [at];
            mov.b64 $0, found;
            }""",
            "=l,l,r,l,~{memory}",
            [ptr.to(tl.int64), COUNT, tl.cast(other, tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    return words


@triton.jit
def any_thread(condition):
    """Whether ``condition`` holds in any thread, for all of them: a `block_barrier`, which waits for loads too."""
    if INTERPRET:
        found = tl.max(condition.to(tl.int32), axis=0)
    else:
        found = tl.inline_asm_elementwise(
            """{
            .reg .pred some;
            setp.ne.b32 some, $1, 0;
            bar.red.or.pred some, 0, some;
            selp.b32 $0, 1, 0, some;
            }""",
            "=r,r,~{memory}",
            [condition.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found != 0


@triton.jit
def await_earlier_kernels():
    """Wait until the stream's earlier kernels have ended, before the first access to memory.

    A kernel that is launched early (programmatic dependent launch) may begin when those before it have no more than
    ends of programs left, or allow it.
    """
    if cuda_capability_geq(9, 0):
        _execute("griddepcontrol.wait; mov.b32 $0, 0;")


@triton.jit
def start_next_kernel():
    """Let the stream's next kernel take the SMs that this one leaves, and wait there for its end.

    Only a kernel that waits for no peer may: it ends whatever room the next one takes.
    """
    if cuda_capability_geq(9, 0):
        _execute("griddepcontrol.launch_dependents; mov.b32 $0, 0;")

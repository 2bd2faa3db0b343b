"""A CUDA driver for Triton without a GPU: fake_libcuda.c, compiled, with tests/helpers/device_rules.py behind it."""

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from tests.helpers import cubin
from tests.helpers import device_rules as rules

NUM_SMS = 132
# The least of the devices that run an architecture's kernels: sm_86, 89 and 120 run those of sm_80.
SHARED_BYTES = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
_SUCCESS, _INVALID_VALUE = 0, 1


def _attributes(arch: int) -> dict[int, int]:
    return {
        10: 32,  # warp size
        12: 64 << 10,  # registers per block
        13: 1_980_000,  # clock rate
        16: NUM_SMS,
        36: 2_619_000,  # memory clock rate
        37: 5120,  # memory bus width
        75: arch // 10,
        76: arch % 10,
        81: SHARED_BYTES[arch] + 1024,  # shared memory per multiprocessor
        97: SHARED_BYTES[arch],  # shared memory per block, opt in
        122: 1,  # streams can write 64 bits
    }


class _Function(ctypes.Structure):
    _fields_ = [(name, c_int) for name in ("registers", "local", "static_shared", "max_threads", "max_dynamic_shared")]


class _Attribute(ctypes.Structure):
    _fields_ = [("kind", c_int), ("value", c_uint64 * 8)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", POINTER(_Attribute)),
        ("num_attributes", c_uint),
    ]


_LOAD = ctypes.CFUNCTYPE(c_int, c_void_p, c_char_p, POINTER(c_void_p))
_TENSOR_MAP = ctypes.CFUNCTYPE(
    c_int,
    c_void_p,
    c_int,
    c_uint,
    c_void_p,
    POINTER(c_uint64),
    POINTER(c_uint64),
    POINTER(c_uint32),
    POINTER(c_uint32),
    c_int,
    c_int,
)
_LAUNCH = ctypes.CFUNCTYPE(c_int, c_void_p, POINTER(_Config), POINTER(c_void_p))
_WRITE = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64, c_uint64, c_uint)


class Refused(Exception):
    """What the device does not take; Triton's launchers raise it again as RuntimeError, with this text."""


class FakeDriver:
    """The library, compiled into ``folder`` and loaded in place of the machine's, or ``library``, loaded already.

    ``launches`` and ``tensor_maps`` hold what the device took, ``enqueued`` the launches among the writes of streams.
    ``tensors``: memory of the call; ``streams``: their handles.
    """

    def __init__(
        self,
        folder: Path,
        arch: int,
        tensors: Callable[[], Iterable[rules.Range]],
        streams: Callable[[], Sequence[int]],
        library: Path | None = None,
    ) -> None:
        self.arch, self.tensors, self.streams = arch, tensors, streams
        self.launches: list[rules.Launch] = []
        self.enqueued: list[rules.Launch | rules.Write] = []
        self.tensor_maps: list[rules.TensorMap] = []
        self._functions: dict[int, tuple[_Function, cubin.CubinKernel]] = {}
        self._library = ctypes.CDLL(str(library or _built(folder)), mode=ctypes.RTLD_GLOBAL)
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        attributes = (c_int * 256).in_dll(self._library, "fake_attributes")
        known = _attributes(arch)
        for attribute in range(256):
            attributes[attribute] = known.get(attribute, -1)
        self._hooks = {
            "fake_load": _LOAD(self._guarded(self._load)),
            "fake_tensor_map": _TENSOR_MAP(self._guarded(self._tensor_map)),
            "fake_launch": _LAUNCH(self._guarded(self._launch)),
            "fake_write": _WRITE(self._guarded(self._write)),
        }
        for name in self._hooks:
            self._install(name, True)

    def check(self, on: bool) -> None:
        """Whether what comes is checked and kept, or taken at once."""
        self._install("fake_tensor_map", on)
        self._install("fake_launch", on)
        self._install("fake_write", on)

    def _install(self, name: str, on: bool) -> None:
        address = ctypes.cast(self._hooks[name], c_void_p).value if on else None
        c_void_p.in_dll(self._library, name).value = address

    def _guarded(self, hook: Callable[..., None]) -> Callable[..., int]:
        """ctypes drops exceptions: a refusal becomes an error of the driver, and so does a mistake of the hook."""

        def guarded(*args: Any) -> int:
            try:
                hook(*args)
            except Exception as error:
                text = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
                (ctypes.c_char * 1024).in_dll(self._library, "fake_refusal").value = text.encode()[:1023]
                return _INVALID_VALUE
            return _SUCCESS

        return guarded

    def _load(self, image: int, name: bytes, function: Any) -> None:
        kernel = cubin.kernel_of(ctypes.string_at(image, cubin.size_of(ctypes.string_at(image, 64))))
        assert kernel.name == name.decode(), (kernel.name, name)
        known = _Function(
            kernel.registers, 0, kernel.static_shared, kernel.threads, rules.DEFAULT_SHARED - kernel.static_shared
        )
        address = ctypes.addressof(known)
        self._functions[address] = known, kernel
        function[0] = address

    def _tensor_map(
        self,
        map: int,
        data_type: int,
        rank: int,
        address: int | None,
        dims: Any,
        strides: Any,
        box: Any,
        element_strides: Any,
        interleave: int,
        swizzle: int,
    ) -> None:
        encoded = rules.TensorMap(
            data_type,
            address or 0,
            tuple(dims[:rank]),
            tuple(strides[: rank - 1]),
            tuple(box[:rank]),
            tuple(element_strides[:rank]),
            interleave,
            swizzle,
        )
        _refuse_if_any(rules.tensor_map_violations(encoded, self.arch, list(self.tensors())))
        ctypes.memmove(map, len(self.tensor_maps).to_bytes(128, "little"), 128)  # which one a launch gets
        self.tensor_maps.append(encoded)

    def _launch(self, function: int, config: Any, arguments: Any) -> None:
        known, kernel = self._functions[function]
        c = config.contents
        launch = rules.Launch(
            kernel,
            tuple(c.grid),
            tuple(c.block),
            c.shared,
            known.max_dynamic_shared,
            c.stream or 0,
            tuple(c.attributes[i].kind for i in range(c.num_attributes)),
            tuple(ctypes.string_at(arguments[i], size) for i, size in enumerate(kernel.parameters)),
        )
        _refuse_if_any(rules.launch_violations(launch))
        self.launches.append(launch)
        self.enqueued.append(launch)

    def _write(self, stream: int | None, address: int, value: int, flags: int) -> None:
        write = rules.Write(stream or 0, address, value, flags)
        _refuse_if_any(rules.write_violations(write, self.streams(), list(self.tensors())))
        self.enqueued.append(write)


def _refuse_if_any(violations: Iterable[str]) -> None:
    text = "; ".join(violations)
    if text:
        raise Refused(text)


def _built(folder: Path) -> Path:
    """libcuda.so.1, compiled with the headers of the Triton that is imported."""
    import triton

    include = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
    library, source = folder / "libcuda.so.1", Path(__file__).with_name("fake_libcuda.c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    return library

"""What a cubin says of its kernel. A driver takes the kernel's arguments and limits from there, so this is independent
of what Triton remembers about the kernel.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

# Attributes of the sections .nv.info, as `cuobjdump -elf` names them.
_MAX_THREADS, _REQUIRED_THREADS, _PARAMETER, _REGISTERS = 0x05, 0x10, 0x17, 0x2F
_RESERVED = (
    1024  # bytes of shared memory of each block, which drivers do not count: Inductor's tiles take 48 KiB on sm_90
)
_SIZED = 0x04  # a format of such an attribute: 16 bits of size, then so many bytes


@dataclass(frozen=True)
class CubinKernel:
    name: str
    parameters: tuple[int, ...]  # their sizes in bytes, in order
    registers: int  # per thread
    static_shared: int  # bytes
    threads: int  # per block: what the kernel requires, or at most takes
    required: bool


def kernel_of(image: bytes) -> CubinKernel:
    sections = dict(_sections(image))
    (name,) = (each.removeprefix(".nv.info.") for each in sections if each.startswith(".nv.info."))
    own = list(_attributes(sections[f".nv.info.{name}"]))
    parameters = {}
    for kind, data in own:
        if kind == _PARAMETER:
            _, ordinal, _, packed = struct.unpack("<IHHI", data)
            parameters[ordinal] = packed >> 18
    assert sorted(parameters) == list(range(len(parameters))), f"{name} lacks parameters: {sorted(parameters)}"
    threads = {kind: struct.unpack("<III", data)[0] for kind, data in own if kind in (_MAX_THREADS, _REQUIRED_THREADS)}
    registers = [
        struct.unpack("<II", data)[1] for kind, data in _attributes(sections[".nv.info"]) if kind == _REGISTERS
    ]
    return CubinKernel(
        name=name,
        parameters=tuple(parameters[i] for i in range(len(parameters))),
        registers=max(registers),
        static_shared=len(sections.get(f".nv.shared.{name}", b"")) - _RESERVED * (".nv.shared.reserved.0" in sections),
        threads=threads.get(_REQUIRED_THREADS, threads.get(_MAX_THREADS, 1024)),
        required=_REQUIRED_THREADS in threads,
    )


def size_of(header: bytes) -> int:
    """The size of the ELF file that begins with these 64 bytes, which ends with its table of sections or segments."""
    segments, sections = struct.unpack_from("<QQ", header, 0x20)
    sizes = struct.unpack_from("<HHHH", header, 0x36)
    return max(segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])


def _sections(image: bytes) -> Iterator[tuple[str, bytes]]:
    assert image[:4] == b"\x7fELF", image[:4]
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", image, table + i * size) for i in range(count)]
    letters = headers[names][4]
    for name, kind, _, _, offset, length in headers:
        end = image.index(b"\0", letters + name)
        nobits = kind == 8
        yield image[letters + name : end].decode(), bytes(length) if nobits else image[offset : offset + length]


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at < len(section):
        layout, kind, size = struct.unpack_from("<BBH", section, at)
        at += 4
        if layout == _SIZED:
            yield kind, section[at : at + size]
            at += size

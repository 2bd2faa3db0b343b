"""Builds the optional extension fusedcomm.kernels.cpu.native; the rest is in pyproject.toml."""

import os
import runpy
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any

from setuptools import find_packages, setup

NAME = "fusedcomm.kernels.cpu.native"
FOLDER = Path("kernels/cpu")
UNITS = 2  # of translation, since parsing of torch's headers takes longer than all of our code


def reject_reason() -> str | None:
    """Why the extension cannot be built here, None if it can."""
    if sys.platform != "linux":
        return f"it needs Linux (memfd_create), got {sys.platform}"
    compiler = shlex.split(os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[0]
    if shutil.which(compiler) is None:
        return f"no C++ compiler found ({compiler})"
    try:
        import torch.utils.cpp_extension  # noqa: F401
    except Exception as error:
        return f"no torch in the build environment ({error}); --no-build-isolation uses yours"
    return None


def left_out(reason: object) -> None:
    print(f"{NAME} is left out, ops on CPU will run unfused: {reason}", file=sys.stderr)


def write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:  # else ninja would compile again
        path.write_text(text)


def write_unit(path: Path, index: int) -> str:
    sources = sorted(FOLDER.glob("*.cpp"), key=lambda source: source.stat().st_size)
    write(path, "".join(f'#include "{source.absolute()}"\n' for source in sources[index::UNITS]))
    return str(path)


def native_extension() -> dict[str, Any]:
    """The arguments of setup() that build the extension."""
    from torch.utils.cpp_extension import BuildExtension, CppExtension, is_ninja_available

    class OptionalBuild(BuildExtension):
        def run(self) -> None:
            for left in self.get_outputs():  # in build/, for another torch maybe, and newer than the sources
                Path(left).unlink(missing_ok=True)
            try:
                super().run()
            except Exception as error:
                left_out(error)
                self.extensions: list[Any] = []

        def build_extensions(self) -> None:
            folder = Path(self.build_temp).absolute()
            folder.mkdir(parents=True, exist_ok=True)
            # A header, not a macro of the command line: a change compiles again only the files that it is in.
            write(folder / "sources_digest.h", f'#define FUSEDCOMM_SOURCES "{digest}"\n')
            extension.include_dirs.append(str(folder))
            extension.sources = [write_unit(folder / f"unit_{index}.cpp", index) for index in range(UNITS)]
            super().build_extensions()

    digest = runpy.run_path(str(FOLDER / "sources.py"))["digest"]()
    extension = CppExtension(
        NAME,
        sources=[str(source) for source in sorted(FOLDER.glob("*.cpp"))],
        depends=[str(header) for header in sorted(FOLDER.glob("*.h"))],
        define_macros=[("USE_C10D", None), ("USE_DISTRIBUTED", None)],
        # torch before 2.13 asks for C++17
        extra_compile_args=["-std=c++20", "-O2", "-g0", "-Wall", "-fvisibility=hidden"],
    )
    return {
        "ext_modules": [extension],
        "cmdclass": {"build_ext": OptionalBuild.with_options(use_ninja=is_ninja_available())},
    }


packages = find_packages(include=["fusedcomm", "fusedcomm.*"])
beside = find_packages(include=["kernels", "kernels.*", "bench", "bench.*"])
packages += [f"fusedcomm.{name}" for name in beside]  # as package_dir maps them
arguments: dict[str, Any] = {}
if not {"dist_info", "egg_info"} & set(sys.argv):  # pip's questions before it builds, each seconds of importing torch
    if reason := reject_reason():
        left_out(reason)
    else:
        arguments = native_extension()
setup(packages=packages, **arguments)

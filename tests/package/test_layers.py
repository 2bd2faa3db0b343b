"""The rooms of the package stand above each other, and nothing imports upward: not inside functions, not for types."""

import pkgutil
import re
import shutil
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import fusedcomm
from docs.generate.imports import LAYERS, imports, modules, room

ROOT = Path(__file__).parents[2]

MOST_ROOMS = 20  # not counting tests/
MOST_FILES_IN_ROOT = 8
COMMAND_ROOMS = ("bench", "tools")  # a command has the name of what it shows


def upward(root: Path) -> list[str]:
    """The imports that do not go down, as ``file:line``."""
    files = modules(root)
    return [
        f"{files[name].relative_to(root)}:{line}: {room(name)} imports {target}"
        for name in files
        for target, line in imports(name, files)
        if room(target) != room(name) and LAYERS.index(room(target)) > LAYERS.index(room(name))
    ]


def circle(root: Path) -> list[str]:
    """Modules that import each other in a circle, or none. A folder's __init__ counts as the modules that it offers."""
    files = modules(root)
    graph = {name: {target for target, _ in imports(name, files)} for name in files}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_nothing_imports_upward() -> None:
    assert not upward(ROOT)


def test_no_modules_import_each_other() -> None:
    assert not circle(ROOT)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("fusedcomm", "kernels", "bench"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.so", "kernels")
        )
    return tmp_path


PLANTED = (
    "from fusedcomm.ops import dispatch\n",
    "def late() -> None:\n    from fusedcomm.ops.dispatch import run\n",
    "if TYPE_CHECKING:\n    import fusedcomm.ops.dispatch\n",
    "import fusedcomm\n",
)


@pytest.mark.thorough
def test_an_upward_import_is_found(copy: Path) -> None:
    file = copy / "fusedcomm" / "memory" / "vote.py"
    source = file.read_text()
    for planted in PLANTED:
        file.write_text(source + planted)
        (found,) = upward(copy)
        assert found.startswith("fusedcomm/memory/vote.py:")


def test_a_circle_is_found(copy: Path) -> None:
    file = copy / "fusedcomm" / "memory" / "segment.py"
    file.write_text(file.read_text() + "from fusedcomm.memory import workspace\n")
    assert {"fusedcomm.memory.segment", "fusedcomm.memory.workspace"} <= set(circle(copy))


def test_rooms_are_few_and_all_have_their_place() -> None:
    rooms = {room(name) for name in modules(ROOT)}
    assert rooms == set(LAYERS)
    assert len(rooms) <= MOST_ROOMS
    assert len(list((ROOT / "fusedcomm").glob("*.py"))) <= MOST_FILES_IN_ROOT


def test_one_fused_call_is_read_in_few_files() -> None:
    """The files of the steps that docs/architecture.md numbers: the common ones, and the GPU's."""
    page = (ROOT / "docs" / "architecture.md").read_text().partition("## One call")[2].partition("\n## ")[0]
    common, _, fused = re.split(r"^\*\*(?=[CG]PU)", page, flags=re.MULTILINE)[:3]
    steps = re.findall(r"^\d+\. .*(?:\n   .*)*", common + fused, re.MULTILINE)
    found = set(re.findall(r"`((?:fusedcomm|kernels)/[\w/]+\.\w+)", "\n".join(steps)))
    assert len(steps) == 10 and len(found) <= 20


def test_costs_are_short() -> None:
    files = [*(ROOT / "fusedcomm" / "plan" / "cost").glob("*.py"), ROOT / "fusedcomm" / "tools" / "tune.py"]
    assert sum(file.read_text().count("\n") for file in files) <= 900


def test_the_package_does_not_hold_itself() -> None:
    """torch imports all packages below it where TORCH_LOGS names it."""
    assert "fusedcomm" not in {each.name for each in pkgutil.iter_modules(fusedcomm.__path__)}


def test_no_module_has_the_name_of_its_folder_or_of_another() -> None:
    """An op has one stem in every folder, and a command the name of what it shows."""
    files = modules(ROOT)
    names = [name for name, file in files.items() if file.name not in ("__init__.py", "__main__.py")]
    assert not [name for name in names if len(set(name.split(".")[-2:])) == 1]
    ops = {name.rpartition(".")[2] for name in names if name.startswith("fusedcomm.ops.") and "matmul" in name}
    stems = Counter(
        name.rpartition(".")[2]
        for name in names
        if room(name) not in (*COMMAND_ROOMS, "kernels") and name.rpartition(".")[2] not in ops
    )
    assert not [stem for stem, count in stems.items() if count > 1]

// The group behind a name: rank, size, the store of the live group, and a number that tells groups of one name apart.
#pragma once

#include <pybind11/pybind11.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <cstdint>
#include <map>
#include <string>
#include <utility>

namespace fusedcomm {

struct Group {
  std::string name;
  int rank;
  int size;
  c10::intrusive_ptr<c10d::Store> store;
  uint64_t identity;  // 0 for a group from set_group_info, which torch never changes
};

// A number for the process group that has this name now, or 0 if none has. Names and addresses are reused, and any
// reference from C++, even a weak one, would keep the store and its server alive. So a Python weak reference is kept.
inline uint64_t process_group_identity(const std::string& name) {
  namespace py = pybind11;
  struct Known {
    py::object weak_group;
    uint64_t identity;
  };
  static auto* known = new std::map<std::string, Known>();  // guarded by the GIL; outlives the interpreter
  static uint64_t num_known = 0;

  py::gil_scoped_acquire gil;
  try {
    const py::object group = py::module_::import("torch._C._distributed_c10d").attr("_resolve_process_group")(name);
    Known& entry = (*known)[name];
    if (!entry.weak_group || !entry.weak_group().is(group)) entry = {py::weakref(group), ++num_known};
    return entry.identity;
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_KeyboardInterrupt)) throw;
    return 0;
  }
}

// The live process group of this name, else what set_group_info said. The order matters: group info outlives its
// process group, and would lead to the store of a destroyed one.
inline Group find_group(const std::string& name) {
  if (const uint64_t identity = process_group_identity(name); identity != 0) {
    const auto group = c10d::resolve_process_group(name);
    if (auto store = group->getStore()) {
      return {name, group->getRank(), group->getSize(), std::move(store), identity};
    }
  }
  const auto& info = c10d::symmetric_memory::get_group_info(name);
  return {name, info.rank, info.world_size, info.store, 0};
}

}  // namespace fusedcomm

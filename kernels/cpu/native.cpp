// The extension module fusedcomm.kernels.cpu.native.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#include <string>

#include "sources_digest.h"  // setup.py writes it
#include "flags.h"
#include "pages.h"

namespace py = pybind11;

namespace fusedcomm {

void register_symmetric_memory();            // symmetric_memory.cpp
void bind_op_kernels(py::module_& module);   // op_kernels.cpp
void bind_direct_calls(py::module_& module);  // direct_calls.cpp

namespace {

void check_address(const char* name, uintptr_t address) {
  if (address == 0 || address % sizeof(int64_t) != 0) {
    throw py::value_error(std::string(name) + " must be the address of a 64-bit word, got " + std::to_string(address));
  }
}

// The classes of torch that symmetric_memory.cpp derives from change from one minor release to the next.
void check_torch() {
  const std::string release = std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  const auto found = py::module_::import("torch").attr("__version__").cast<std::string>();
  if (found.rfind(release, 0) != 0) throw py::import_error("built for torch " TORCH_VERSION ", got " + found);
}

}  // namespace
}  // namespace fusedcomm

PYBIND11_MODULE(native, m) {
  using namespace fusedcomm;
  check_torch();
  m.doc() = "Words in shared memory, the CPU backend of torch symmetric memory, and prepared calls.";
  m.attr("SOURCES") = FUSEDCOMM_SOURCES;  // kernels/cpu/sources.py

  m.def(
      "signal",
      [](uintptr_t address, int64_t value) {
        check_address("address", address);
        signal_word(address, value);
      },
      py::arg("address"), py::arg("value"), "Store a 64-bit word after all earlier writes of this thread (release).");

  m.def(
      "store32",
      [](uintptr_t address, uint32_t value) {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        __atomic_store_n(reinterpret_cast<uint32_t*>(address), value, __ATOMIC_RELEASE);
      },
      py::arg("address"), py::arg("value"), "Store a 32-bit word after all earlier writes of this thread (release).");

  m.def(
      "load",
      [](uintptr_t address) {
        check_address("address", address);
        return load_word(address);
      },
      py::arg("address"), "Load a 64-bit word before all later reads of this thread (acquire).");

  m.def(
      "wait",
      [](uintptr_t address, int64_t epoch, uintptr_t broken, int64_t num_broken, double timeout_s) {
        check_address("address", address);
        if (num_broken > 0) check_address("broken", broken);
        return wait_word(address, epoch, broken, num_broken, timeout_s);
      },
      py::arg("address"), py::arg("epoch"), py::arg("broken"), py::arg("num_broken"), py::arg("timeout_s"),
      "Wait until `flag >> 24 >= epoch`, or one of the `num_broken` words at `broken` is not zero and of that epoch "
      "or an earlier one (`word >> 8`), or the time is over; return the flag last seen (acquire).");

  m.def(
      "prefer_huge_pages", [](uintptr_t address, uintptr_t num_bytes) { prefer_huge_pages(address, num_bytes); },
      py::arg("address"), py::arg("num_bytes"), "Ask for large pages in a range of memory that is not touched yet.");

  m.def(
      "register_symmetric_memory",
      [] {
        static const bool registered = (register_symmetric_memory(), true);
        static_cast<void>(registered);
      },
      "Make this the CPU backend of torch symmetric memory.");

  bind_op_kernels(m);
  bind_direct_calls(m);
}

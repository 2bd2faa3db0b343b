// The class ResultsHeap of the extension module.
#include "results_heap.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace fusedcomm {

void bind_results_heap(py::module_ module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ResultsHeap, std::shared_ptr<ResultsHeap>>(module, "ResultsHeap", "Results in this rank's symmetric memory, where peers can write them.")
      .def(py::init<const at::Tensor&, size_t>(), py::arg("segment"), py::arg("least_bytes"))
      .def("empty", &ResultsHeap::empty, py::arg("sizes"), py::arg("dtype"),
           "A contiguous tensor, in a block that is warm if there is one and it is not small, else in ordinary memory.")
      .def("place", &ResultsHeap::place, py::arg("tensor"),
           "Where the tensor's storage begins in the segment, or None if it is no block that peers may write.")
      .def("retire", &ResultsHeap::retire, "From now on hand out no block; tensors stay valid.")
      .def("trim", &ResultsHeap::trim, py::arg("bound"), without_gil,
           "Give memory of free blocks back to the system, all but `bound` bytes.")
      .def_property_readonly("live_bytes", [](const ResultsHeap& heap) { return heap.stats().live_bytes; })
      .def_property_readonly("free_bytes", [](const ResultsHeap& heap) { return heap.stats().free_bytes; })
      .def_property_readonly("held_bytes", [](const ResultsHeap& heap) { return heap.stats().held_bytes; })
      .def_property_readonly("warm_bytes", [](const ResultsHeap& heap) { return heap.stats().warm_bytes; })
      .def_property_readonly("num_blocks", [](const ResultsHeap& heap) { return heap.stats().num_blocks; });
}

}  // namespace fusedcomm

#include "results_heap.h"

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

#include "pages.h"

namespace py = pybind11;

namespace fusedcomm {

std::shared_ptr<HeapMemory> ResultsHeap::memory_of(const at::Tensor& segment) {
  TORCH_CHECK_VALUE(segment.device().is_cpu() && segment.scalar_type() == at::kByte && segment.is_contiguous(),
                    "segment must be a contiguous uint8 tensor on CPU");
  const auto address = reinterpret_cast<uintptr_t>(segment.data_ptr());
  const std::shared_ptr<Segment> memory = segment_of(segment.data_ptr());
  TORCH_CHECK_VALUE(memory != nullptr && memory->fd() >= 0 && address % page_bytes() == 0,
                    "segment must begin at a page of this rank's symmetric memory");
  const uintptr_t offset = address - reinterpret_cast<uintptr_t>(memory->base());
  const size_t num_bytes = segment.nbytes() / page_bytes() * page_bytes();
  return HeapMemory::create(memory, offset, num_bytes);
}

c10::DataPtr ResultsHeap::ordinary(size_t num_bytes, Admission::SizeClass& results) const {
  auto result = std::unique_ptr<Ordinary>(new Ordinary{admission_, results, c10::GetCPUAllocator()->allocate(num_bytes)});
  void* data = result->data.get();
  prefer_huge_pages(reinterpret_cast<uintptr_t>(data), num_bytes);
  Admission::has_allocated(results);
  return {data, result.release(), &free_ordinary, c10::Device(c10::kCPU)};
}

at::Tensor ResultsHeap::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  at::detail::check_size_nonnegative(sizes);
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(dtype);
  const size_t num_bytes = at::detail::computeStorageNbytesContiguous(sizes, type.itemsize());
  memory_->meet();
  const bool is_small = num_bytes == 0 || num_bytes < least_bytes_;
  at::Tensor tensor = is_small ? at::Tensor(at::detail::empty_cpu(sizes, dtype))
                               : in_block_or_ordinary(sizes, type, num_bytes);
  const at::Context& settings = at::globalContext();
  if (settings.deterministicAlgorithms() && settings.deterministicFillUninitializedMemory()) {
    tensor.is_floating_point() ? tensor.fill_(std::numeric_limits<double>::quiet_NaN()) : tensor.fill_(0xFF);
  }
  return tensor;
}

at::Tensor ResultsHeap::in_block_or_ordinary(at::IntArrayRef sizes, caffe2::TypeMeta type,
                                                    size_t num_bytes) const {
  Admission::SizeClass& results = admission_->size_class(num_bytes);
  std::unique_ptr<Block> block = memory_->take(num_bytes, results);
  c10::DataPtr data;
  if (block == nullptr) {
    data = ordinary(num_bytes, results);
  } else {
    void* address = block->data();
    data = {address, block.release(), &free_block, c10::Device(c10::kCPU)};
  }
  // The storage is resizable, in ordinary memory.
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), num_bytes, std::move(data),
                                                       c10::GetCPUAllocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                         c10::DispatchKeySet(c10::DispatchKey::CPU), type);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

std::optional<int64_t> ResultsHeap::place(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return std::nullopt;
  const auto* block = tensor.storage().data_ptr().cast_context<Block>(&free_block);
  if (block == nullptr || block->memory != memory_ || !memory_->in_use()) return std::nullopt;
  return static_cast<int64_t>(block->range.key()) + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

bool ResultsHeap::is_warm(int64_t rank, int64_t place, int64_t num_bytes) {
  auto& [storage, warm_until] = heaps_[static_cast<size_t>(rank)];
  const int64_t cold_bytes = place + num_bytes - warm_until;
  if (cold_bytes <= 0) return true;
  warm(reinterpret_cast<uintptr_t>(storage.data()) + static_cast<uintptr_t>(warm_until), static_cast<uintptr_t>(cold_bytes));
  warm_until += cold_bytes;
  return false;
}

void bind_results_heap(py::module_ module) {
  const auto without_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<ResultsHeap, std::shared_ptr<ResultsHeap>>(module, "ResultsHeap", "Results in this rank's symmetric memory, where peers can write them.")
      .def(py::init<const at::Tensor&, size_t, const std::vector<at::Tensor>&>(), py::arg("segment"), py::arg("least_bytes"),
           py::arg("heaps") = std::vector<at::Tensor>())
      .def("empty", &ResultsHeap::empty, py::arg("sizes"), py::arg("dtype"),
           "A contiguous tensor, in a block that is warm if there is one and it is not small, else in ordinary memory.")
      .def("place", &ResultsHeap::place, py::arg("tensor"),
           "Where the tensor begins in the segment, or None if it is in no block that peers may write.")
      .def("is_warm", &ResultsHeap::is_warm, py::arg("rank"), py::arg("place"), py::arg("num_bytes"), without_gil,
           "Whether a peer's result is warm for this process: from now on it is.")
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

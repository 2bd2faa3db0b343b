// Results of ops where peers can write them: tensors in symmetric memory that live and go as any other.
//
// Each is in a block of a heap or in ordinary memory. Both have a deleter, which gives the block back or counts that
// the result is gone. It runs on any thread, with or without the GIL, also while the process ends.
#pragma once

#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/TensorFactories.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "admission.h"
#include "heap_memory.h"
#include "huge_pages.h"
#include "segment.h"

namespace fusedcomm {

std::shared_ptr<Segment> segment_of(void* address);  // symmetric_memory.cpp; null for other memory

class ResultsHeap {
 public:
  // A uint8 tensor in this rank's own symmetric memory. It may go: its memory stays, as long as the heap or a tensor.
  // `least_bytes`: of a result that may take a block.
  ResultsHeap(const at::Tensor& segment, size_t least_bytes) : memory_(memory_of(segment)), least_bytes_(least_bytes) {}

  // A contiguous tensor on CPU, in a block if one is warm or the heap grows for it. It is NaN where torch fills what
  // `empty` returns.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  // Where the tensor's storage begins in the segment, if it is a block of this heap that peers may write.
  std::optional<int64_t> place(const at::Tensor& tensor) const;

  // From now on no block is handed out or used again: a peer that was stopped in a call may still write. Tensors stay
  // valid.
  void retire() { memory_->retire(); }

  // Gives the memory of free blocks back to the system, until at most `bound` bytes of them are warm.
  void trim(size_t bound) { memory_->trim(bound); }

  HeapMemory::Stats stats() const { return memory_->stats(); }

 private:
  using Block = HeapMemory::Block;
  struct Ordinary {
    std::shared_ptr<Admission> admission;
    Admission::SizeClass& results;
    c10::DataPtr data;
  };

  static std::shared_ptr<HeapMemory> memory_of(const at::Tensor& segment);
  at::Tensor in_block_or_ordinary(at::IntArrayRef sizes, caffe2::TypeMeta type, size_t num_bytes) const;
  c10::DataPtr ordinary(size_t num_bytes, Admission::SizeClass& results) const;

  static void free_block(void* context) {
    HeapMemory::give_back(std::unique_ptr<Block>(static_cast<Block*>(context)));
  }
  static void free_ordinary(void* context) {
    const std::unique_ptr<Ordinary> result(static_cast<Ordinary*>(context));
    Admission::has_freed(result->results);
  }

  std::shared_ptr<HeapMemory> memory_;
  size_t least_bytes_;
  std::shared_ptr<Admission> admission_ = std::make_shared<Admission>();
};

inline std::shared_ptr<HeapMemory> ResultsHeap::memory_of(const at::Tensor& segment) {
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

inline c10::DataPtr ResultsHeap::ordinary(size_t num_bytes, Admission::SizeClass& results) const {
  auto result = std::unique_ptr<Ordinary>(new Ordinary{admission_, results, c10::GetCPUAllocator()->allocate(num_bytes)});
  void* data = result->data.get();
  prefer_huge_pages(reinterpret_cast<uintptr_t>(data), num_bytes);
  Admission::has_allocated(results);
  return {data, result.release(), &free_ordinary, c10::Device(c10::kCPU)};
}

inline at::Tensor ResultsHeap::empty(at::IntArrayRef sizes, at::ScalarType dtype) {
  at::detail::check_size_nonnegative(sizes);
  const caffe2::TypeMeta type = c10::scalarTypeToTypeMeta(dtype);
  const size_t num_bytes = at::detail::computeStorageNbytesContiguous(sizes, type.itemsize());
  memory_->meet();
  const bool is_small = num_bytes == 0 || num_bytes < least_bytes_;
  at::Tensor tensor = is_small ? at::Tensor(at::detail::empty_cpu(sizes, dtype))
                               : in_block_or_ordinary(sizes, type, num_bytes);
  const at::Context& settings = at::globalContext();
  if (settings.deterministicAlgorithms() && settings.deterministicFillUninitializedMemory()) {
    at::native::fill_empty_deterministic_(tensor);
  }
  return tensor;
}

inline at::Tensor ResultsHeap::in_block_or_ordinary(at::IntArrayRef sizes, caffe2::TypeMeta type,
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

inline std::optional<int64_t> ResultsHeap::place(const at::Tensor& tensor) const {
  if (!tensor.has_storage()) return std::nullopt;
  const auto* block = tensor.storage().data_ptr().cast_context<Block>(&free_block);
  if (block == nullptr || block->memory != memory_ || !memory_->in_use()) return std::nullopt;
  return static_cast<int64_t>(block->range.key());
}

}  // namespace fusedcomm

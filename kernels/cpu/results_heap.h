// Results of ops where peers can write them: tensors in symmetric memory that live and go as any other.
//
// Each is in a block of a heap or in ordinary memory. Both have a deleter, which gives the block back or counts that
// the result is gone. It runs on any thread, with or without the GIL, also while the process ends.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "admission.h"
#include "heap_memory.h"
#include "segment.h"

namespace fusedcomm {

std::shared_ptr<Segment> segment_of(void* address);  // symmetric_memory.cpp; null for other memory

class ResultsHeap {
 public:
  // A uint8 tensor in this rank's own symmetric memory. It may go: its memory stays, as long as the heap or a tensor.
  // `least_bytes`: of a result that may take a block. `heaps`: every rank's, as this process has mapped it.
  ResultsHeap(const at::Tensor& segment, size_t least_bytes, const std::vector<at::Tensor>& heaps = {})
      : memory_(memory_of(segment)), least_bytes_(least_bytes) {
    for (const auto& each : heaps) heaps_.push_back({each.storage(), 0});
  }

  // A contiguous tensor on CPU, in a block if one is warm or the heap grows for it. It is NaN where torch fills what
  // `empty` returns.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype);

  // Where the tensor begins in the segment, if it is in a block of this heap that peers may write.
  std::optional<int64_t> place(const at::Tensor& tensor) const;

  const c10::Storage& of(int64_t rank) const { return heaps_[static_cast<size_t>(rank)].storage; }

  // Whether a peer's result is warm for this process: from now on it is.
  bool is_warm(int64_t rank, int64_t place, int64_t num_bytes);

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

  struct Mapped {
    c10::Storage storage;
    int64_t warm_until;
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
  std::vector<Mapped> heaps_;
  std::shared_ptr<Admission> admission_ = std::make_shared<Admission>();
};

}  // namespace fusedcomm

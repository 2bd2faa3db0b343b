// The rounds of a workspace on a CPU, as `fusedcomm.memory.workspace.Workspace` counts, signals and waits. What takes
// long or fails is left to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "flags.h"
#include "pages.h"

namespace fusedcomm {

// As in fusedcomm.memory.segment: a workspace with others has no prepared calls.
constexpr int64_t kNumSlots = 2;

// Where things lie in the segments of a group; the offsets are those of `fusedcomm.memory.segment.HeaderLayout`.
struct Segments {
  int64_t rank;
  int64_t group_size;
  std::vector<c10::Storage> storages;  // each rank's segment, as this process has mapped it
  int64_t flags;
  int64_t broken;
  int64_t epoch_word;
  int64_t slots;
  int64_t slot_bytes;

  uintptr_t address(int64_t owner) const {
    return reinterpret_cast<uintptr_t>(storages[static_cast<size_t>(owner)].data());
  }
};

class Rounds {
 public:
  using Wait = std::function<void(int64_t src_rank, int64_t epoch)>;
  using Failed = std::function<void(int64_t epoch)>;

  // `epoch`: the number of rounds that this rank has completed, which the Workspace reads too. `wait` waits as long as it
  // may take and throws what it finds; `failed` throws what a broken word says.
  Rounds(const Segments& segments, int64_t* epoch, int64_t fingerprint, Wait wait, Failed failed)
      : segments_(segments), epoch_(epoch), fingerprint_(fingerprint), wait_(std::move(wait)),
        failed_(std::move(failed)) {}

  int64_t slot() const { return (*epoch_ + 1) % kNumSlots; }
  int64_t slot_offset() const { return segments_.slots + slot() * segments_.slot_bytes; }
  const c10::Storage& storage(int64_t owner) const { return segments_.storages[static_cast<size_t>(owner)]; }


  // Memory for a result of the call.
  static at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype) {
    at::Tensor made = at::empty(sizes, at::TensorOptions().dtype(dtype));
    prefer_huge_pages(reinterpret_cast<uintptr_t>(made.data_ptr()), made.nbytes());
    return made;
  }

  void signal(int64_t dst_rank) const { signal_word(flag(dst_rank, segments_.rank), flag_value()); }

  // The address and the value of a signal that a stream writes.
  std::pair<uintptr_t, uint64_t> signal_to(int64_t dst_rank) const {
    return {flag(dst_rank, segments_.rank), static_cast<uint64_t>(flag_value())};
  }
  // Counts a round whose work is launched; the device ends it.
  void count() { ++*epoch_; }

  void wait(int64_t src_rank) const {
    const uintptr_t own = segments_.address(segments_.rank);
    const int64_t seen = wait_word(flag(segments_.rank, src_rank), *epoch_ + 1, own + segments_.broken,
                                   segments_.group_size, kShortWait);
    if (seen != flag_value()) wait_(src_rank, *epoch_ + 1);
  }

  void end() {
    ++*epoch_;
    const uintptr_t own = segments_.address(segments_.rank);
    signal_word(own + segments_.epoch_word, *epoch_);
    if (any_broken(own + segments_.broken, segments_.group_size, *epoch_)) failed_(*epoch_);
  }

 private:
  static constexpr double kShortWait = 0.02;  // seconds without a look at Python's signals, or at the peers

  int64_t flag_value() const { return (*epoch_ + 1) << kFingerprintBits | fingerprint_; }
  uintptr_t flag(int64_t owner, int64_t src_rank) const {
    const int64_t index = slot() * segments_.group_size + src_rank;
    return segments_.address(owner) + segments_.flags + static_cast<uintptr_t>(index) * sizeof(int64_t);
  }

  const Segments& segments_;
  int64_t* epoch_;
  int64_t fingerprint_;
  Wait wait_;
  Failed failed_;
};

}  // namespace fusedcomm

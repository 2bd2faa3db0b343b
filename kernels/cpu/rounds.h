// The rounds of a workspace on a CPU, as `fusedcomm.memory.workspace.Workspace` counts, signals and waits. What takes
// long or fails is left to it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "flags.h"
#include "huge_pages.h"
#include "results_heap.h"
#include "warm.h"

namespace fusedcomm {

// As in fusedcomm.memory.segment: a workspace with others has no prepared calls.
constexpr int64_t kNumSlots = 2;
constexpr int64_t kPostBytes = 24;

// Where things lie in the segments of a group; the offsets are those of `fusedcomm.memory.segment.HeaderLayout`.
struct Segments {
  int64_t rank;
  int64_t group_size;
  std::vector<c10::Storage> storages;  // each rank's segment, as this process has mapped it
  int64_t flags;
  int64_t broken;
  int64_t epoch_word;
  int64_t posts;
  int64_t marks;
  int64_t slots;
  int64_t slot_bytes;
  std::shared_ptr<ResultsHeap> results;  // null where no result is written in place, and all below is empty
  std::vector<c10::Storage> heaps;       // each rank's results
  int64_t* warm_until;                   // by rank: how much of its heap this process has mapped

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

  int64_t rank() const { return segments_.rank; }
  const c10::Storage& heap(int64_t owner) const { return segments_.heaps[static_cast<size_t>(owner)]; }

  // Memory for a result of the call; where peers can write it, if it will be posted.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, bool posted) const {
    if (posted && segments_.results != nullptr) return segments_.results->empty(sizes, dtype);
    at::Tensor made = at::empty(sizes, at::TensorOptions().dtype(dtype));
    prefer_huge_pages(reinterpret_cast<uintptr_t>(made.data_ptr()), made.nbytes());
    return made;
  }

  // Tells every peer where this round's result is, if they can write it there. `layouts`: by peer, of its chunk in it.
  void post(const at::Tensor& result, const std::vector<int64_t>& layouts) {
    const std::optional<int64_t> place = segments_.results->place(result);
    posts_ = place.has_value();
    for (int64_t step = 1; place && step < segments_.group_size; ++step) {
      const int64_t peer = (segments_.rank + step) % segments_.group_size;
      const uintptr_t words = post_of(peer, segments_.rank);
      signal_word(words, *place);
      signal_word(words + sizeof(int64_t), static_cast<int64_t>(result.nbytes()));
      signal_word(words + 2 * sizeof(int64_t), flag_value() ^ layouts[static_cast<size_t>(peer)]);
    }
  }

  // Whether a peer has not posted yet. All will if this rank has: they have made and freed the same results.
  bool is_peer_late() const {
    for (int64_t peer = 0; posts_ && peer < segments_.group_size; ++peer) {
      if (peer != segments_.rank && stamp_of(peer) >> kFingerprintBits != *epoch_ + 1) return true;
    }
    return false;
  }

  // Where the result of dst_rank begins in its heap, if it has posted one of this size and layout for exactly this
  // round, and it is warm for this process. All is compared before the first store: the memory of an older post may be
  // a tensor.
  std::optional<int64_t> posted(int64_t dst_rank, int64_t num_bytes, int64_t layout) const {
    if (segments_.results == nullptr || stamp_of(dst_rank) != (flag_value() ^ layout)) return std::nullopt;
    const uintptr_t words = post_of(segments_.rank, dst_rank);
    const int64_t place = load_word(words);
    if (load_word(words + sizeof(int64_t)) != num_bytes) return std::nullopt;
    int64_t& warm_until = segments_.warm_until[dst_rank];
    if (place + num_bytes <= warm_until) return place;
    warm(reinterpret_cast<uintptr_t>(heap(dst_rank).data()) + static_cast<uintptr_t>(warm_until),
         static_cast<uintptr_t>(place + num_bytes - warm_until));
    warm_until = place + num_bytes;
    return std::nullopt;
  }

  void mark_in_place(int64_t dst_rank) const { signal_word(mark(dst_rank, segments_.rank), *epoch_ + 1); }
  bool is_in_place(int64_t src_rank) const { return load_word(mark(segments_.rank, src_rank)) == *epoch_ + 1; }

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
    posts_ = false;
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

  uintptr_t mark(int64_t owner, int64_t src_rank) const {
    const int64_t index = slot() * segments_.group_size + src_rank;
    return segments_.address(owner) + static_cast<uintptr_t>(segments_.marks) +
           static_cast<uintptr_t>(index) * sizeof(int64_t);
  }
  uintptr_t post_of(int64_t owner, int64_t src_rank) const {
    return segments_.address(owner) + static_cast<uintptr_t>(segments_.posts + src_rank * kPostBytes);
  }
  int64_t stamp_of(int64_t peer) const { return load_word(post_of(segments_.rank, peer) + 2 * sizeof(int64_t)); }

  const Segments& segments_;
  int64_t* epoch_;
  int64_t fingerprint_;
  Wait wait_;
  Failed failed_;
  bool posts_ = false;  // whether this rank has posted its result in this round
};

}  // namespace fusedcomm

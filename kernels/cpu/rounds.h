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
#include "pages.h"
#include "results_heap.h"

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
  std::shared_ptr<ResultsHeap> results;  // null where no result is written in place

  uintptr_t address(int64_t owner) const {
    return reinterpret_cast<uintptr_t>(storages[static_cast<size_t>(owner)].data());
  }

  // The words on results in place; the last one of a post is its stamp, epoch << 24 | (fingerprint ^ layout).

  // Tells every peer where a round's result is, if they can write it there, and returns whether they can. `layouts`: by
  // peer, of its chunk in the result. The stamp comes last (release).
  bool post(const at::Tensor& result, const std::vector<int64_t>& layouts, int64_t flag_value) const {
    const std::optional<int64_t> place = results->place(result);
    for (int64_t step = 1; place && step < group_size; ++step) {
      const int64_t peer = (rank + step) % group_size;
      const uintptr_t words = post_of(peer, rank);
      signal_word(words, *place);
      signal_word(words + sizeof(int64_t), static_cast<int64_t>(result.nbytes()));
      signal_word(words + 2 * sizeof(int64_t), flag_value ^ layouts[static_cast<size_t>(peer)]);
    }
    return place.has_value();
  }

  // Whether a peer has not posted in this round yet.
  bool is_peer_late(int64_t epoch) const {
    for (int64_t peer = 0; peer < group_size; ++peer) {
      if (peer != rank && stamp_of(peer) >> kFingerprintBits != epoch) return true;
    }
    return false;
  }

  // Where the result of dst_rank begins in its heap, if it has posted one of this size with exactly this stamp, and it
  // is warm for this process. All is compared before the first store: the memory of an older post may be a tensor, and
  // a result of another layout has the chunk elsewhere.
  std::optional<int64_t> posted(int64_t dst_rank, int64_t num_bytes, int64_t stamp) const {
    if (results == nullptr || stamp_of(dst_rank) != stamp) return std::nullopt;
    const uintptr_t words = post_of(rank, dst_rank);
    const int64_t place = load_word(words);
    if (load_word(words + sizeof(int64_t)) != num_bytes) return std::nullopt;
    return results->is_warm(dst_rank, place, num_bytes) ? std::optional(place) : std::nullopt;
  }

  void mark(int64_t dst_rank, int64_t epoch) const { signal_word(mark_of(dst_rank, rank, epoch), epoch); }
  bool is_marked(int64_t src_rank, int64_t epoch) const { return load_word(mark_of(rank, src_rank, epoch)) == epoch; }

 private:
  uintptr_t mark_of(int64_t owner, int64_t src_rank, int64_t epoch) const {
    const int64_t index = epoch % kNumSlots * group_size + src_rank;
    return address(owner) + static_cast<uintptr_t>(marks) + static_cast<uintptr_t>(index) * sizeof(int64_t);
  }
  uintptr_t post_of(int64_t owner, int64_t src_rank) const {
    return address(owner) + static_cast<uintptr_t>(posts + src_rank * kPostBytes);
  }
  int64_t stamp_of(int64_t peer) const { return load_word(post_of(rank, peer) + 2 * sizeof(int64_t)); }
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
  const c10::Storage& heap(int64_t owner) const { return segments_.results->of(owner); }

  // Memory for a result of the call; where peers can write it, if it will be posted.
  at::Tensor empty(at::IntArrayRef sizes, at::ScalarType dtype, bool posted) const {
    if (posted && segments_.results != nullptr) return segments_.results->empty(sizes, dtype);
    at::Tensor made = at::empty(sizes, at::TensorOptions().dtype(dtype));
    prefer_huge_pages(reinterpret_cast<uintptr_t>(made.data_ptr()), made.nbytes());
    return made;
  }

  // As `Segments` does, in this round.
  void post(const at::Tensor& result, const std::vector<int64_t>& layouts) {
    posts_ = segments_.post(result, layouts, flag_value());
  }
  // All peers will post if this rank has: they have made and freed the same results.
  bool is_peer_late() const { return posts_ && segments_.is_peer_late(*epoch_ + 1); }
  std::optional<int64_t> posted(int64_t dst_rank, int64_t num_bytes, int64_t layout) const {
    return segments_.posted(dst_rank, num_bytes, flag_value() ^ layout);
  }
  void mark_in_place(int64_t dst_rank) const { segments_.mark(dst_rank, *epoch_ + 1); }
  bool is_in_place(int64_t src_rank) const { return segments_.is_marked(src_rank, *epoch_ + 1); }

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

  const Segments& segments_;
  int64_t* epoch_;
  int64_t fingerprint_;
  Wait wait_;
  Failed failed_;
  bool posts_ = false;  // whether this rank has posted its result in this round
};

}  // namespace fusedcomm

// The memory of a heap in a segment: its blocks, and what becomes of them when the process forks.
//
// A forked child inherits shared memory, not a copy. So in the child each heap is mapped again, privately, over the
// same addresses: what the child writes stays with it. Until it writes into a page, it sees what this process writes
// there. So a block that a child may still read is held back, and used again when the child has gone.
#pragma once

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "admission.h"
#include "forks.h"
#include "free_ranges.h"
#include "gil.h"
#include "pages.h"
#include "segment.h"

namespace fusedcomm {

class HeapMemory;

// All heaps of this process, and the one lock for them and their blocks. It is held for moments only: nothing that can
// block is done with it. fork() takes it, so that no other thread holds it in the child.
struct Heaps {
  std::mutex mutex;
  std::vector<HeapMemory*> live;
  Forks forks;
};

inline Heaps& heaps();

class HeapMemory : public std::enable_shared_from_this<HeapMemory> {
 public:
  // Part of the heap, for one result. The heap's memory stays as long as any block.
  struct Block {
    std::shared_ptr<HeapMemory> memory;  // null for one that is held back
    FreeRanges::Range range;
    uint64_t taken_after;        // so many forks
    uint64_t freed_after;        // if it is held back
    std::unique_ptr<Block> next;  // held back before it

    void* data() const { return memory->base_ + range.key(); }
  };

  struct Stats {
    size_t live_bytes;
    size_t free_bytes;  // those that are warm
    size_t held_bytes;  // freed, but a child may still read them
    size_t warm_bytes;  // the mark
    size_t num_blocks;  // live ones
  };

  static std::shared_ptr<HeapMemory> create(std::shared_ptr<Segment> segment, size_t offset, size_t num_bytes);
  static bool holds(const void* address);  // whether it is in a heap of this process
  HeapMemory(const HeapMemory&) = delete;
  HeapMemory& operator=(const HeapMemory&) = delete;
  ~HeapMemory();

  // A block for a result of this size class, or null: then the result goes to ordinary memory.
  std::unique_ptr<Block> take(size_t num_bytes, Admission::SizeClass& results);
  static void give_back(std::unique_ptr<Block> block) noexcept;

  // Once for each result, in a block or not. At every 1024th it gives back what is warm beyond twice the most that was
  // in use since the 2048th result before.
  void meet();

  void retire();
  bool in_use() const;
  void trim(size_t bound);
  Stats stats() const;

  void make_private() noexcept;  // in a forked child
  bool may_be_read() const { return !private_ && num_blocks_ > 0; }

 private:
  HeapMemory(std::shared_ptr<Segment> segment, size_t offset, size_t num_bytes)
      : segment_(std::move(segment)), file_offset_(offset), base_(static_cast<char*>(segment_->base()) + offset),
        num_bytes_(num_bytes), free_(num_bytes) {}

  bool overlaps(const HeapMemory& other) const {
    return base_ < other.base_ + other.num_bytes_ && other.base_ < base_ + num_bytes_;
  }

  // Where a block may begin. Blocks that were held back are among those if nothing warm fits otherwise.
  std::optional<size_t> find(size_t num_bytes);
  void release_held();
  void punch(std::vector<FreeRanges::Range> ranges);

  static constexpr uint64_t kSpan = 1024;
  static constexpr size_t kLeastSurplus = 1 << 20;  // less is not worth a system call

  const std::shared_ptr<Segment> segment_;
  const size_t file_offset_;
  char* const base_;
  const size_t num_bytes_;

  // With the lock:
  FreeRanges free_;
  uint64_t num_results_ = 0;
  size_t most_ = 0;         // in use in this span of results
  size_t most_before_ = 0;  // and in the one before
  std::unique_ptr<Block> held_;
  size_t held_bytes_ = 0;
  uint64_t released_at_ = 0;  // Forks::num_looks_that_found then
  size_t live_bytes_ = 0;
  size_t num_blocks_ = 0;
  bool retired_ = false;
  bool private_ = false;
};

inline Heaps& heaps() {
  // It is never destroyed: threads free results while the process ends.
  static Heaps* all = [] {
    const auto before = [] {
      heaps().mutex.lock();
      const auto& live = heaps().live;
      const auto may_be_read = [](const HeapMemory* memory) { return memory->may_be_read(); };
      heaps().forks.before(std::any_of(live.begin(), live.end(), may_be_read));
    };
    const auto in_parent = [] {
      heaps().forks.in_parent();
      heaps().mutex.unlock();
    };
    const auto in_child = [] {
      heaps().forks.in_child();
      for (HeapMemory* memory : heaps().live) memory->make_private();
      heaps().mutex.unlock();
    };
    pthread_atfork(before, in_parent, in_child);
    return new Heaps;
  }();
  return *all;
}

// System calls only: other threads of the parent may have held any lock at the fork. A child of the child inherits
// private memory, and would lose its contents. A child that gets no mapping of its own dies if it writes.
inline void HeapMemory::make_private() noexcept {
  if (private_) return;
  private_ = retired_ = true;
  const auto file_offset = static_cast<off_t>(file_offset_);
  const int flags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  if (mmap(base_, num_bytes_, PROT_READ | PROT_WRITE, flags, segment_->fd(), file_offset) == MAP_FAILED) {
    mprotect(base_, num_bytes_, PROT_READ);
  }
}

inline std::shared_ptr<HeapMemory> HeapMemory::create(std::shared_ptr<Segment> segment, size_t offset,
                                                      size_t num_bytes) {
  std::shared_ptr<HeapMemory> memory(new HeapMemory(std::move(segment), offset, num_bytes));
  std::lock_guard<std::mutex> lock(heaps().mutex);
  for (const HeapMemory* other : heaps().live) {
    if (memory->overlaps(*other)) throw std::invalid_argument("this memory is in use by another heap or its results");
  }
  heaps().live.push_back(memory.get());
  return memory;
}

inline bool HeapMemory::holds(const void* address) {
  const auto* byte = static_cast<const char*>(address);
  std::lock_guard<std::mutex> lock(heaps().mutex);
  const auto& live = heaps().live;
  return std::any_of(live.begin(), live.end(), [&](const HeapMemory* memory) {
    return memory->base_ <= byte && byte < memory->base_ + memory->num_bytes_;
  });
}

inline HeapMemory::~HeapMemory() {
  {
    std::lock_guard<std::mutex> lock(heaps().mutex);
    auto& live = heaps().live;
    live.erase(std::remove(live.begin(), live.end(), this), live.end());
  }
  while (held_ != nullptr) held_ = std::move(held_->next);  // one by one: a chain would go by recursion
}

inline std::unique_ptr<HeapMemory::Block> HeapMemory::take(size_t num_bytes, Admission::SizeClass& results) {
  const size_t block_bytes = (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  std::unique_ptr<Block> block(new Block{shared_from_this(), FreeRanges::make_range(0, block_bytes), 0, 0, nullptr});
  std::pair<size_t, size_t> cold;
  {
    std::lock_guard<std::mutex> lock(heaps().mutex);
    if (retired_) return nullptr;
    const std::optional<size_t> found = find(block_bytes);
    if (!found) return nullptr;
    if (*found + block_bytes > free_.warm_bytes()) {
      if (!Admission::grows_for(results)) return nullptr;
      Admission::has_grown_for(results);
    }
    cold = free_.take(*found, block_bytes);
    block->range.key() = *found;
    block->taken_after = heaps().forks.count();
    live_bytes_ += block_bytes;
    most_ = std::max(most_, live_bytes_);
    ++num_blocks_;
  }
  if (cold.second > 0) {
    WithoutGil gil;
    warm(reinterpret_cast<uintptr_t>(base_) + cold.first, cold.second);
  }
  return block;
}

inline std::optional<size_t> HeapMemory::find(size_t num_bytes) {
  std::optional<size_t> found = free_.find(num_bytes);
  const bool is_warm = found && *found + num_bytes <= free_.warm_bytes();
  if (is_warm || held_ == nullptr) return found;
  release_held();
  return free_.find(num_bytes);
}

inline void HeapMemory::release_held() {
  Forks& forks = heaps().forks;
  forks.look();
  if (released_at_ == forks.num_looks_that_found()) return;
  released_at_ = forks.num_looks_that_found();
  for (std::unique_ptr<Block>* link = &held_; *link != nullptr;) {
    Block& block = **link;
    if (forks.may_read(block.taken_after, block.freed_after)) {
      link = &block.next;
    } else {
      held_bytes_ -= block.range.mapped();
      free_.put(std::move(block.range));
      *link = std::unique_ptr<Block>(std::move(block.next));
    }
  }
}

inline void HeapMemory::give_back(std::unique_ptr<Block> block) noexcept {
  const std::shared_ptr<HeapMemory> memory = std::move(block->memory);  // it may go, after the lock
  std::lock_guard<std::mutex> lock(heaps().mutex);
  memory->live_bytes_ -= block->range.mapped();
  --memory->num_blocks_;
  if (memory->retired_) return;
  block->freed_after = heaps().forks.count();
  const bool seen_by_child = heaps().forks.may_read(block->taken_after, block->freed_after);
  if (!seen_by_child) return memory->free_.put(std::move(block->range));
  memory->held_bytes_ += block->range.mapped();
  block->next = std::move(memory->held_);
  memory->held_ = std::move(block);
}

inline void HeapMemory::retire() {
  std::lock_guard<std::mutex> lock(heaps().mutex);
  retired_ = true;
}

inline bool HeapMemory::in_use() const {
  std::lock_guard<std::mutex> lock(heaps().mutex);
  return !retired_;
}

inline void HeapMemory::trim(size_t bound) {
  std::vector<FreeRanges::Range> ranges;
  {
    std::lock_guard<std::mutex> lock(heaps().mutex);
    if (private_) return;
    ranges = free_.cut(bound / page_bytes() * page_bytes());
  }
  punch(std::move(ranges));
}

inline void HeapMemory::meet() {
  std::vector<FreeRanges::Range> ranges;
  {
    std::lock_guard<std::mutex> lock(heaps().mutex);
    if (++num_results_ % kSpan != 0) return;
    const size_t kept = 2 * std::max(most_, most_before_) - live_bytes_;
    most_before_ = std::exchange(most_, live_bytes_);
    if (retired_ || free_.free_warm_bytes() < kept + kLeastSurplus) return;
    ranges = free_.cut(kept);
  }
  WithoutGil gil;
  punch(std::move(ranges));
}

// Nobody gets the ranges while their pages go. Peers have them mapped too, and only find them cold again: what a range
// becomes is posted when it is warm.
inline void HeapMemory::punch(std::vector<FreeRanges::Range> ranges) {
  for (const auto& range : ranges) madvise(base_ + range.key(), range.mapped(), MADV_REMOVE);
  std::lock_guard<std::mutex> lock(heaps().mutex);
  for (auto& range : ranges) free_.put(std::move(range));
}

inline HeapMemory::Stats HeapMemory::stats() const {
  std::lock_guard<std::mutex> lock(heaps().mutex);
  return {live_bytes_, free_.free_warm_bytes(), held_bytes_, free_.warm_bytes(), num_blocks_};
}

}  // namespace fusedcomm

// The memory of a heap in a segment: its blocks, and what becomes of them when the process forks.
//
// A forked child inherits shared memory, not a copy. So in the child each heap is mapped again, privately, over the
// same addresses: what the child writes stays with it. Until it writes into a page, it sees what this process writes
// there. So a block that a child may still read is not used again.
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
#include "free_ranges.h"
#include "gil.h"
#include "segment.h"
#include "warm.h"

namespace fusedcomm {

class HeapMemory;

// All heaps of this process, and the one lock for them and their blocks. It is held for moments only: nothing that can
// block is done with it. fork() takes it, so that no other thread holds it in the child.
struct Heaps {
  std::mutex mutex;
  std::vector<HeapMemory*> live;
  uint64_t num_forks = 0;
};

inline Heaps& heaps();

class HeapMemory : public std::enable_shared_from_this<HeapMemory> {
 public:
  // Part of the heap, for one result. The heap's memory stays as long as any block.
  struct Block {
    std::shared_ptr<HeapMemory> memory;
    FreeRanges::Range range;
    uint64_t num_forks;  // before it was taken

    void* data() const { return memory->base_ + range.key(); }
  };

  struct Stats {
    size_t live_bytes;
    size_t free_bytes;  // those that are warm
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
  static void give_back(Block& block) noexcept;

  void retire();
  bool in_use() const;
  void trim(size_t bound);
  Stats stats() const;

  void make_private() noexcept;  // in a forked child

 private:
  HeapMemory(std::shared_ptr<Segment> segment, size_t offset, size_t num_bytes)
      : segment_(std::move(segment)), file_offset_(offset), base_(static_cast<char*>(segment_->base()) + offset),
        num_bytes_(num_bytes), free_(num_bytes) {}

  bool overlaps(const HeapMemory& other) const {
    return base_ < other.base_ + other.num_bytes_ && other.base_ < base_ + num_bytes_;
  }

  const std::shared_ptr<Segment> segment_;
  const size_t file_offset_;
  char* const base_;
  const size_t num_bytes_;

  // With the lock:
  FreeRanges free_;
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
      ++heaps().num_forks;
    };
    const auto in_parent = [] { heaps().mutex.unlock(); };
    const auto in_child = [] {
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
  std::lock_guard<std::mutex> lock(heaps().mutex);
  auto& live = heaps().live;
  live.erase(std::remove(live.begin(), live.end(), this), live.end());
}

inline std::unique_ptr<HeapMemory::Block> HeapMemory::take(size_t num_bytes, Admission::SizeClass& results) {
  const size_t block_bytes = (num_bytes + page_bytes() - 1) / page_bytes() * page_bytes();
  std::unique_ptr<Block> block(new Block{shared_from_this(), FreeRanges::make_range(0, block_bytes), 0});
  std::pair<size_t, size_t> cold;
  {
    std::lock_guard<std::mutex> lock(heaps().mutex);
    if (retired_) return nullptr;
    const std::optional<size_t> found = free_.find(block_bytes);
    if (!found) return nullptr;
    if (*found + block_bytes > free_.warm_bytes()) {
      if (!Admission::grows_for(results)) return nullptr;
      Admission::has_grown_for(results);
    }
    cold = free_.take(*found, block_bytes);
    block->range.key() = *found;
    block->num_forks = heaps().num_forks;
    live_bytes_ += block_bytes;
    ++num_blocks_;
  }
  if (cold.second > 0) {
    WithoutGil gil;
    warm(reinterpret_cast<uintptr_t>(base_) + cold.first, cold.second);
  }
  return block;
}

inline void HeapMemory::give_back(Block& block) noexcept {
  HeapMemory& memory = *block.memory;
  std::lock_guard<std::mutex> lock(heaps().mutex);
  memory.live_bytes_ -= block.range.mapped();
  --memory.num_blocks_;
  const bool seen_by_child = block.num_forks != heaps().num_forks;
  if (!memory.retired_ && !seen_by_child) memory.free_.put(std::move(block.range));
}

inline void HeapMemory::retire() {
  std::lock_guard<std::mutex> lock(heaps().mutex);
  retired_ = true;
}

inline bool HeapMemory::in_use() const {
  std::lock_guard<std::mutex> lock(heaps().mutex);
  return !retired_;
}

// Nobody gets the ranges while their pages go.
inline void HeapMemory::trim(size_t bound) {
  std::vector<FreeRanges::Range> ranges;
  {
    std::lock_guard<std::mutex> lock(heaps().mutex);
    if (private_) return;
    ranges = free_.cut(bound / page_bytes() * page_bytes());
  }
  for (const auto& range : ranges) madvise(base_ + range.key(), range.mapped(), MADV_REMOVE);
  std::lock_guard<std::mutex> lock(heaps().mutex);
  for (auto& range : ranges) free_.put(std::move(range));
}

inline HeapMemory::Stats HeapMemory::stats() const {
  std::lock_guard<std::mutex> lock(heaps().mutex);
  return {live_bytes_, free_.free_warm_bytes(), free_.warm_bytes(), num_blocks_};
}

}  // namespace fusedcomm

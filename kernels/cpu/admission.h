// When a heap of results grows.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fusedcomm {

// What has become of the results in ordinary memory, by size class: sizes up to twice another. It outlives the heap,
// as results do, and is used on any thread.
class Admission {
 public:
  struct SizeClass {
    std::atomic<int64_t> kept{0};
    std::atomic<int64_t> freed{0};
  };

  SizeClass& size_class(size_t num_bytes) {
    return classes_[num_bytes == 0 ? 0 : static_cast<size_t>(64 - __builtin_clzll(num_bytes))];
  }

  // Whether the heap shall grow by a block. The first touch of a block, by its owner and by the peers, costs more than
  // ordinary memory and its copy, so a block must be used again. It is where a program frees its results: results of
  // this class were freed at least twice, and more of them than are kept. A free speaks for one block only, or a
  // program that begins to keep its results would fill the heap with them.
  static bool grows_for(const SizeClass& results) {
    const int64_t freed = results.freed.load(std::memory_order_relaxed);
    return freed >= 2 && freed > results.kept.load(std::memory_order_relaxed);
  }

  static void has_grown_for(SizeClass& results) { results.freed.fetch_sub(1, std::memory_order_relaxed); }

  static void has_allocated(SizeClass& results) { results.kept.fetch_add(1, std::memory_order_relaxed); }
  static void has_freed(SizeClass& results) {
    results.kept.fetch_sub(1, std::memory_order_relaxed);
    results.freed.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  std::array<SizeClass, 65> classes_;
};

}  // namespace fusedcomm

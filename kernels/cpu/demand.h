// When a heap gives memory back.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace fusedcomm {

// At every 1024th result a heap gives back what is warm beyond `factor` times the most that was in use since the 2048th
// result before. The factor is 2, and doubles whenever the heap grows again after that: a program whose need comes and
// goes pays for it a few times only, and a steady one never.
class Demand {
 public:
  // At each result. Returns how many bytes of the heap may stay warm, where it is time to look.
  std::optional<size_t> meet(size_t live_bytes) {
    most_ = std::max(most_, live_bytes);
    if (++num_results_ % kSpan != 0) return std::nullopt;
    const size_t bound = std::max(most_, most_before_) * factor_;
    most_before_ = most_;
    most_ = live_bytes;
    return bound;
  }

  void take(size_t live_bytes) { most_ = std::max(most_, live_bytes); }
  void give_back() { has_given_back_ = true; }
  void grow() {
    if (has_given_back_ && factor_ < kMostFactor) factor_ *= 2;
    has_given_back_ = false;
  }

 private:
  static constexpr uint64_t kSpan = 1024;
  static constexpr size_t kMostFactor = 1024;

  uint64_t num_results_ = 0;
  size_t most_ = 0;         // in use in this span
  size_t most_before_ = 0;  // and in the one before
  size_t factor_ = 2;
  bool has_given_back_ = false;
};

}  // namespace fusedcomm

// Which bytes of a heap are free, and which are warm: those below one mark, since the lowest free range that fits is
// taken.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace fusedcomm {

class FreeRanges {
  using Ranges = std::map<size_t, size_t>;  // bytes by offset; neighbours are one range

 public:
  // An offset (key) and a number of bytes (mapped) on their way into the map or out of it: to put one back allocates
  // nothing, and so cannot fail.
  using Range = Ranges::node_type;

  static Range make_range(size_t offset, size_t num_bytes) {
    Ranges one{{offset, num_bytes}};
    return one.extract(one.begin());
  }

  explicit FreeRanges(size_t num_bytes) : free_{{0, num_bytes}} {}

  size_t warm_bytes() const { return warm_bytes_; }
  size_t free_warm_bytes() const;

  // Where a free range of this size begins: the lowest one if that is among the lowest 256 ranges, else the last one if
  // that fits. So a heap in pieces costs no long search, and a result that finds nothing goes to ordinary memory.
  std::optional<size_t> find(size_t num_bytes) const;

  // Takes bytes from where find() says. The mark rises to their end. What is to be warmed is returned: it begins at the
  // mark and not at the bytes, as all below the mark must be warm.
  std::pair<size_t, size_t> take(size_t offset, size_t num_bytes);

  void put(Range range) noexcept;

  // Takes out what is free beyond the lowest `bound` bytes. The mark falls to where that begins.
  std::vector<Range> cut(size_t bound);

 private:
  static constexpr int kMostSteps = 256;

  Ranges free_;
  size_t warm_bytes_ = 0;  // the mark
};

inline size_t FreeRanges::free_warm_bytes() const {
  size_t sum = 0;
  for (const auto& [offset, num_bytes] : free_) {
    if (offset < warm_bytes_) sum += std::min(num_bytes, warm_bytes_ - offset);
  }
  return sum;
}

inline std::optional<size_t> FreeRanges::find(size_t num_bytes) const {
  int steps = 0;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (++steps == kMostSteps) it = std::prev(free_.end());
    if (it->second >= num_bytes) return it->first;
  }
  return std::nullopt;
}

inline std::pair<size_t, size_t> FreeRanges::take(size_t offset, size_t num_bytes) {
  Range rest = free_.extract(offset);
  rest.key() += num_bytes;
  rest.mapped() -= num_bytes;
  if (rest.mapped() > 0) free_.insert(std::move(rest));
  const size_t mark = warm_bytes_;
  warm_bytes_ = std::max(mark, offset + num_bytes);
  return {mark, warm_bytes_ - mark};
}

inline void FreeRanges::put(Range range) noexcept {
  const auto next = free_.upper_bound(range.key());
  if (next != free_.end() && range.key() + range.mapped() == next->first) {
    range.mapped() += next->second;
    free_.erase(next);
  }
  const auto after = free_.upper_bound(range.key());
  const auto before = after == free_.begin() ? free_.end() : std::prev(after);
  if (before != free_.end() && before->first + before->second == range.key()) {
    before->second += range.mapped();
  } else {
    free_.insert(std::move(range));
  }
}

inline std::vector<FreeRanges::Range> FreeRanges::cut(size_t bound) {
  std::vector<Range> cut;
  cut.reserve(free_.size());
  auto it = free_.begin();
  for (; it != free_.end() && it->second <= bound; ++it) bound -= it->second;
  if (it != free_.end() && bound > 0) {  // this one stays in part
    cut.push_back(make_range(it->first + bound, it->second - bound));
    (it++)->second = bound;
  }
  while (it != free_.end()) cut.push_back(free_.extract(it++));
  if (!cut.empty()) warm_bytes_ = std::min(warm_bytes_, cut.front().key());
  return cut;
}

}  // namespace fusedcomm

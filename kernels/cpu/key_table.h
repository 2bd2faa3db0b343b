// What is kept of calls that are alike, by a key of what makes them alike.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace fusedcomm {

using Key = c10::SmallVector<int64_t, 64>;

struct HashKey {
  size_t operator()(const Key& key) const {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a over words
    for (const int64_t word : key) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
    return static_cast<size_t>(hash ^ (hash >> 32));
  }
};

// Calls by key. Its owner has a lock for it.
template <typename Call>
class KeyTable {
 public:
  using Entries = std::unordered_map<Key, std::shared_ptr<Call>, HashKey>;

  // What is kept under the key; else null, and whether the key has been asked for before, so that it is worth it.
  std::pair<std::shared_ptr<Call>, bool> find(const Key& key) {
    const auto found = entries_.find(key);
    if (found != entries_.end()) return {found->second, false};  // null: it has no plan
    if (met_.size() >= kMost) met_.clear();
    return {nullptr, !met_.insert(key).second};
  }

  // What goes for it is in `call` and `dropped` then, to be destroyed without the lock: Python objects take the GIL.
  void add(Key key, std::shared_ptr<Call>& call, Entries& dropped) {
    if (entries_.size() >= kMost) std::swap(entries_, dropped);
    std::swap(entries_[std::move(key)], call);
  }

  void clear(Entries& dropped) {
    std::swap(entries_, dropped);
    met_.clear();
  }

  size_t size() const { return entries_.size(); }

 private:
  static constexpr size_t kMost = 4096;

  Entries entries_;
  std::unordered_set<Key, HashKey> met_;
};

}  // namespace fusedcomm

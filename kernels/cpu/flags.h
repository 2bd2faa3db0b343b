// 64-bit words in symmetric memory: a signal is a release store, a wait acquires it.
#pragma once

#include <atomic>
#include <cstdint>

#include "spin.h"

namespace fusedcomm {

constexpr int kFingerprintBits = 24;  // a flag is epoch << 24 | fingerprint
constexpr int kKindBits = 8;

inline int64_t load_word(uintptr_t address) {
  return __atomic_load_n(reinterpret_cast<const int64_t*>(address), __ATOMIC_ACQUIRE);
}

inline void signal_word(uintptr_t address, int64_t value) {
  // A release store does not order the streaming stores of a BLAS before it; a full fence does.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  __atomic_store_n(reinterpret_cast<int64_t*>(address), value, __ATOMIC_RELEASE);
}

// Broken words are kind | epoch << 8. A peer that failed in a later round has completed this one, which is still good.
inline bool any_broken(uintptr_t words, int64_t num_words, int64_t epoch) {
  for (int64_t i = 0; i < num_words; ++i) {
    const int64_t word = load_word(words + static_cast<uintptr_t>(i) * sizeof(int64_t));
    if (word != 0 && (word >> kKindBits) <= epoch) return true;
  }
  return false;
}

// Waits for the signal of round `epoch`, but only until a peer fails in it or until the deadline. Returns the last
// flag.
inline int64_t wait_word(uintptr_t address, int64_t epoch, uintptr_t broken, int64_t num_broken, double timeout_s) {
  int64_t flag = load_word(address);
  if ((flag >> kFingerprintBits) >= epoch) return flag;
  WithoutGil gil;
  for (Spin spin(timeout_s, gil); !any_broken(broken, num_broken, epoch) && spin.again();) {
    flag = load_word(address);
    if ((flag >> kFingerprintBits) >= epoch) return flag;
  }
  return load_word(address);  // the signal may have come just before the broken word
}

}  // namespace fusedcomm

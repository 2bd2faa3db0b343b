// The lock of a group's calls: of threads in Python, and of prepared calls, which run without the GIL.
#pragma once

#include <chrono>
#include <mutex>

#include "python_objects.h"

namespace fusedcomm {

class CallLock {
 public:
  // Waits without the GIL, open to Ctrl-C.
  void lock() {
    if (mutex_.try_lock()) return;
    while (true) {
      {
        WithoutGil gil;
        if (mutex_.try_lock_until(Clock::now() + kSlice)) return;
      }
      check_python_signals();
    }
  }
  void unlock() { mutex_.unlock(); }

 private:
#if defined(__SANITIZE_THREAD__)
  using Clock = std::chrono::system_clock;  // by pthread_mutex_clocklock, which it does not see, it finds no lock taken
#else
  using Clock = std::chrono::steady_clock;
#endif
  static constexpr auto kSlice = std::chrono::milliseconds(50);

  std::recursive_timed_mutex mutex_;
};

}  // namespace fusedcomm

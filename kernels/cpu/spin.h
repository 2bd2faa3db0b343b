// How a thread waits for a word that another process writes.
#pragma once

#include <sched.h>
#include <time.h>

#include <algorithm>
#include <chrono>

#include "gil.h"

namespace fusedcomm {

inline void cpu_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Pauses for some microseconds, then yields, then sleeps, so that more ranks than cores make progress.
//     for (Spin spin(timeout_s, gil); !ready();)
//       if (!spin.again()) return timed_out;
class Spin {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr double kForever = 1e9;  // seconds

  Spin(double timeout_s, WithoutGil& gil)
      : gil_(gil), pauses_left_(timeout_s > 0 ? kPauses : 0), start_(Clock::now()) {
    const double seconds = timeout_s > 0 ? std::min(timeout_s, kForever) : 0.0;
    deadline_ = start_ + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  }

  // Waits a little. Returns false once the time is over; after the last sleep the caller always looks once more.
  bool again() {
    if (pauses_left_ > 0) {
      --pauses_left_;
      cpu_pause();
      return true;
    }
    const auto now = Clock::now();
    if (now >= deadline_) return false;
    if (now - start_ < kYield) {
      sched_yield();
    } else {
      sleep(std::min<Clock::duration>(kSleep, deadline_ - now));
      if (++num_sleeps_ % kSleepsPerSignalCheck == 0) gil_.check_signals();
    }
    return true;
  }

 private:
  static constexpr int kPauses = 100;
  static constexpr auto kYield = std::chrono::microseconds(500);
  static constexpr auto kSleep = std::chrono::microseconds(100);
  static constexpr int kSleepsPerSignalCheck = 256;

  static void sleep(Clock::duration duration) {
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
    const timespec request{0, static_cast<long>(ns)};
    nanosleep(&request, nullptr);
  }

  WithoutGil& gil_;
  int pauses_left_;
  int num_sleeps_ = 0;
  Clock::time_point start_;
  Clock::time_point deadline_;
};

}  // namespace fusedcomm

// The last prepared calls of this process, for `fusedcomm.memory.flight_recorder`.
#pragma once

#include <pthread.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "python_objects.h"

namespace fusedcomm {

// Python's time.monotonic().
inline double monotonic() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

struct RecordedCall {
  std::shared_ptr<PythonObject> record;  // what is the same in all calls of its kind
  std::weak_ptr<PythonObject> workspace;
  int64_t sequence = 0;
  int64_t number = 0;
  int64_t resets = 0;
  int64_t rounds_before = 0;
  int64_t rounds_after = 0;
  double started = 0;
  double ended = 0;  // 0 while it runs
  std::string error;
  std::vector<int64_t> peers;
};

class CallRing {
 public:
  // Its lock is held while this process forks, so that a child finds it free, and the calls whole.
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }

  // Returns the number by which `end` finds the call.
  int64_t begin(RecordedCall call) {
    std::lock_guard<std::mutex> lock(mutex_);
    call.sequence = ++sequence_;
    std::swap(calls_[static_cast<size_t>(call.sequence) % kNumCalls], call);
    return sequence_;
  }

  void end(int64_t sequence, int64_t rounds_after, std::string error = "", std::vector<int64_t> peers = {}) {
    std::lock_guard<std::mutex> lock(mutex_);
    RecordedCall& call = calls_[static_cast<size_t>(sequence) % kNumCalls];
    if (call.sequence != sequence) return;  // others have come since
    call.ended = monotonic();
    call.rounds_after = rounds_after;
    call.error = std::move(error);
    call.peers = std::move(peers);
  }

  std::vector<RecordedCall> calls() const {
    std::vector<RecordedCall> found;
    std::lock_guard<std::mutex> lock(mutex_);
    std::copy_if(calls_.begin(), calls_.end(), std::back_inserter(found),
                 [](const RecordedCall& call) { return call.sequence != 0; });
    return found;
  }

  void clear() {
    std::array<RecordedCall, kNumCalls> dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    std::swap(calls_, dropped);
  }

 private:
  static constexpr size_t kNumCalls = 256;  // fusedcomm.memory.flight_recorder.NUM_CALLS

  mutable std::mutex mutex_;
  std::array<RecordedCall, kNumCalls> calls_;
  int64_t sequence_ = 0;
};

// The ring of this process. It is never destroyed, as calls may end while the process does.
inline CallRing& call_ring() {
  static CallRing* ring = [] {
    const auto after = [] { call_ring().after_fork(); };
    pthread_atfork([] { call_ring().before_fork(); }, after, after);
    return new CallRing;
  }();
  return *ring;
}

}  // namespace fusedcomm

// The streams and events of one run on a GPU, by libc10 and the driver: this compiles against a torch without CUDA.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "driver.h"

namespace fusedcomm {

constexpr size_t kNumStreams = 3;  // MAIN, SENDS, READS of fusedcomm.plan.schedule.Stream

// Calls of a device and lane run in one order on it, across groups, streams and threads (memory/launch_order.py).
class LaunchOrder {
 public:
  std::recursive_mutex& mutex() { return mutex_; }
  void begin(const c10::Stream& stream) {
    if (last_ && stream != *stream_) last_->block(stream);  // one stream is in order by itself
  }
  void end(const c10::Stream& stream) {
    if (!last_) last_.emplace(stream.device_type());
    last_->record(stream);
    stream_ = stream;
  }

 private:
  std::recursive_mutex mutex_;
  std::optional<c10::Event> last_;
  std::optional<c10::Stream> stream_;  // that it was recorded on
};

// An event of a plan. Those of libc10 look at the device before and after, which takes ten times as long.
class Event {
 public:
  void record(void* stream) {
    if (!event_) event_.reset(Driver::get().make_event());
    Driver::get().record(event_.get(), stream);
  }
  void block(void* stream) const { Driver::get().await(event_.get(), stream); }

 private:
  struct Destroy {
    void operator()(void* event) const { Driver::get().destroy(event); }
  };
  std::unique_ptr<void, Destroy> event_;
};

class Streams {
 public:
  // `own`: SENDS and READS. MAIN is the caller's current one.
  Streams(c10::Device device, const std::vector<c10::Stream>& own, std::vector<Event>& events)
      : guard_(device.type()), device_(device), streams_{guard_.getStream(device), own.at(0), own.at(1)}, events_(events) {
    Driver::get().ensure_context(device.index());
    for (size_t i = 0; i < kNumStreams; ++i) handles_[i] = guard_.getStreamNativeHandle(streams_[i]);
  }
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  ~Streams() { use(0); }

  const c10::Stream& main() const { return streams_[0]; }
  void* handle(size_t stream) const { return handles_[stream]; }

  // Makes it torch's current stream.
  void use(size_t stream) {
    if (stream == current_) return;
    guard_.exchangeStream(streams_[stream]);
    current_ = stream;
  }
  void record(size_t stream, int64_t event) { events_[static_cast<size_t>(event)].record(handles_[stream]); }
  void await(size_t stream, int64_t event) { events_[static_cast<size_t>(event)].block(handles_[stream]); }

  // What follows on MAIN comes after all that was begun, also where a call ends half way.
  void join() {
    for (size_t i = 1; i < kNumStreams; ++i) {
      c10::Event event(device_.type());
      event.record(streams_[i]);
      event.block(streams_[0]);
    }
  }

 private:
  c10::impl::VirtualGuardImpl guard_;
  c10::Device device_;
  std::array<c10::Stream, kNumStreams> streams_;
  std::array<void*, kNumStreams> handles_{};
  std::vector<Event>& events_;
  size_t current_ = 0;
};

}  // namespace fusedcomm

// A group's store, with all calls bounded: where the store's host cannot be reached, a call blocks for as long as TCP
// tries (minutes), whatever time-out the store has. So each call runs on a thread of its own, which is left behind if
// it is late. Where no thread can be started, the caller makes the call itself.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "gil.h"

namespace fusedcomm {

class BoundedStore {
 public:
  using Clock = std::chrono::steady_clock;
  using Keys = std::vector<std::string>;

  BoundedStore(c10::intrusive_ptr<c10d::Store> store, WithoutGil& gil) : store_(std::move(store)), gil_(gil) {}

  // A call that has not returned by the deadline throws DistStoreError.
  void set_deadline(Clock::time_point deadline) { deadline_ = deadline; }

  void set(const std::string& key, const std::string& value) const {
    run([key, value](c10d::Store& store) { store.set(key, value); });
  }
  std::string get(const std::string& key) const {
    return run([key](c10d::Store& store) { return store.get_to_str(key); });
  }
  std::vector<std::vector<uint8_t>> get_all(const Keys& keys) const {
    return run([keys](c10d::Store& store) { return store.multiGet(keys); });
  }
  bool check(const Keys& keys) const {
    return run([keys](c10d::Store& store) { return store.check(keys); });
  }
  int64_t add(const std::string& key, int64_t value) const {
    return run([key, value](c10d::Store& store) { return store.add(key, value); });
  }
  void remove(const std::string& key) const {
    run([key](c10d::Store& store) { store.deleteKey(key); });
  }

 private:
  // The call owns what it uses: it may outlive this object.
  template <class Call>
  auto run(Call call) const -> decltype(call(std::declval<c10d::Store&>())) {
    using Result = decltype(call(std::declval<c10d::Store&>()));
    auto task = std::make_shared<std::packaged_task<Result()>>([store = store_, call] { return call(*store); });
    std::future<Result> result = task->get_future();
    try {
      std::thread([task] { (*task)(); }).detach();
    } catch (const std::system_error&) {
      (*task)();
    }
    while (result.wait_until(std::min(deadline_, Clock::now() + kSignalCheck)) != std::future_status::ready) {
      if (Clock::now() >= deadline_) {
        C10_THROW_ERROR(DistStoreError, "the store of the process group does not answer: is its host cut off?");
      }
      gil_.check_signals();
    }
    return result.get();
  }

  static constexpr auto kSignalCheck = std::chrono::milliseconds(50);

  c10::intrusive_ptr<c10d::Store> store_;
  WithoutGil& gil_;
  Clock::time_point deadline_ = Clock::time_point::max();
};

}  // namespace fusedcomm

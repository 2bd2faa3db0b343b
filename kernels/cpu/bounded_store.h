// A group's store, with all calls bounded: where the store's host cannot be reached, a call blocks for as long as TCP
// tries (minutes), whatever time-out the store has. So each call runs on a thread of its own, which is left behind if
// it is late.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fusedcomm {

class BoundedStore {
 public:
  using Clock = std::chrono::steady_clock;
  using Keys = std::vector<std::string>;

  explicit BoundedStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  // A call that has not returned by the deadline throws DistStoreError.
  void set_deadline(Clock::time_point deadline) { deadline_ = deadline; }

  std::chrono::milliseconds timeout() const { return store_->getTimeout(); }
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
    std::thread([task] { (*task)(); }).detach();
    if (result.wait_until(deadline_) != std::future_status::ready) {
      C10_THROW_ERROR(DistStoreError, "the store of the process group does not answer: is its host cut off?");
    }
    return result.get();
  }

  c10::intrusive_ptr<c10d::Store> store_;
  Clock::time_point deadline_ = Clock::time_point::max();
};

}  // namespace fusedcomm

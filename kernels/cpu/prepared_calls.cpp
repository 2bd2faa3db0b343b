#include "prepared_calls.h"

#include <pthread.h>

#include <algorithm>

namespace fusedcomm {
namespace {

std::atomic<bool> forked{false};  // in a child no call may run: it is no rank

struct Known {
  using Owner = std::pair<void*, c10::Device>;  // a group, on a device

  std::mutex mutex;
  std::vector<std::pair<Owner, std::weak_ptr<PreparedCalls>>> calls;

  auto find(const Owner& owner) {
    return std::find_if(calls.begin(), calls.end(), [&](const auto& each) { return each.first == owner; });
  }
};

Known& known() {
  static auto* all = [] {
    pthread_atfork(nullptr, nullptr, [] { forked = true; });
    return new Known();
  }();
  return *all;
}

std::vector<c10::IValue> run_plan(PreparedCall& call, const std::vector<at::Tensor>& inputs, Rounds& rounds) {
  const std::vector<at::Tensor> made = call.plan->run(inputs, rounds);
  const auto one = [&](int64_t index) {
    return index == kEmpty ? at::empty({0}, inputs.front().options()) : made[static_cast<size_t>(index)];
  };
  std::vector<c10::IValue> results;
  for (const Output& each : call.outputs) {
    if (const auto* index = std::get_if<int64_t>(&each)) {
      results.emplace_back(one(*index));
    } else {
      c10::List<at::Tensor> list;
      for (const int64_t index : std::get<std::vector<int64_t>>(each)) list.push_back(one(index));
      results.emplace_back(std::move(list));
    }
  }
  return results;
}

}  // namespace

void PreparedCalls::enlist(const std::shared_ptr<PreparedCalls>& calls) {
  std::lock_guard<std::mutex> guard(known().mutex);
  const Known::Owner owner{calls->group(), calls->device()};
  const auto found = known().find(owner);
  if (found != known().calls.end()) {
    found->second = calls;
  } else {
    known().calls.emplace_back(owner, calls);
  }
}

bool PreparedCalls::withdraw() {
  std::lock_guard<std::mutex> guard(known().mutex);
  const auto found = known().find({group_, device_});
  if (found == known().calls.end() || found->second.lock().get() != this) return false;
  known().calls.erase(found);
  return true;
}

std::shared_ptr<PreparedCalls> PreparedCalls::of(const std::string& group_name, c10::Device device) {
  if (forked) return nullptr;
  c10d::ProcessGroup* group = nullptr;
  try {
    group = c10d::resolve_process_group(group_name).get();
  } catch (const std::exception&) {  // Python says what is wrong with the name
    return nullptr;
  }
  std::lock_guard<std::mutex> guard(known().mutex);
  const auto found = known().find({group, device});
  return found == known().calls.end() ? nullptr : found->second.lock();
}

void PreparedCalls::clear(std::shared_ptr<const CallContext> context, int64_t resets) {
  KeyTable<PreparedCall>::Entries dropped;
  std::lock_guard<std::mutex> guard(mutex_);
  ++generation_;
  calls_.clear(dropped);
  std::swap(context_, context);
  resets_ = resets;
}

std::pair<std::shared_ptr<PreparedCall>, bool> PreparedCalls::find(const Key& key) {
  std::lock_guard<std::mutex> guard(mutex_);
  return key.front() == generation_ ? calls_.find(key) : std::pair<std::shared_ptr<PreparedCall>, bool>();
}

void PreparedCalls::add(Key key, std::shared_ptr<PreparedCall> call) {
  KeyTable<PreparedCall>::Entries dropped;
  std::lock_guard<std::mutex> guard(mutex_);
  if (key.front() != generation_) return;
  calls_.add(std::move(key), call, dropped);
}

bool PreparedCalls::run(PreparedCall& call, const std::vector<at::Tensor>& tensors, std::vector<c10::IValue>& results) {
  std::unique_lock<CallLock> guard(*lock_, std::defer_lock);
  guard.lock();
  const std::shared_ptr<const CallContext> context = call.has_rounds ? context_ : nullptr;
  if (call.generation != generation_ || (call.has_rounds && (!context || context->is_broken()))) return false;
  const auto num_rounds = [&] { return context ? *context->epoch : 0; };
  const int64_t before = num_rounds();
  const int64_t sequence = call_ring().begin(
      {call.record, call.workspace, 0, ++*num_calls_, resets_, before, before, monotonic(), 0, "", {}});
  if (!context) guard.unlock();  // a backend's waits may be long
  try {
    if (context) {
      run_rounds(call, *context, tensors, results);
    } else {
      results = call.tape.run(tensors, nullptr);
    }
  } catch (const std::exception&) {
    with_gil([&, error = std::current_exception()] {
      const auto& rescue = call.rescue->get();
      const auto told = rescue.attr("tell")(as_python(error)).cast<std::pair<std::string, std::vector<int64_t>>>();
      call_ring().end(sequence, num_rounds(), told.first, told.second);
      rescue.attr("dump")(told.first);
    });
    throw;
  }
  call_ring().end(sequence, num_rounds());
  return true;
}

void PreparedCalls::run_rounds(PreparedCall& call, const CallContext& context, const std::vector<at::Tensor>& tensors,
                               std::vector<c10::IValue>& results) const {
  const auto& rescue = *call.rescue;
  const int64_t number = *num_calls_;
  Rounds rounds(
      context.segments, context.epoch, call.fingerprint,
      [&](int64_t src_rank, int64_t epoch) {
        with_gil([&] { rescue.get().attr("wait")(src_rank, epoch, number); });
      },
      [&](int64_t epoch) { with_gil([&] { rescue.get().attr("check")(epoch); }); });
  try {
    results = call.plan ? run_plan(call, tensors, rounds) : call.tape.run(tensors, &rounds);
  } catch (const std::exception&) {
    // A wait that fails has told the peers what they must know. Ctrl-C may come before it begins.
    if (!context.is_broken()) with_gil([&] { rescue.get().attr("abandon")(as_python(std::current_exception())); });
    throw;
  }
}

}  // namespace fusedcomm

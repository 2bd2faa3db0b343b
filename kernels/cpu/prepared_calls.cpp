#include "prepared_calls.h"

#include <ATen/ops/empty.h>
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

std::vector<c10::IValue> outputs_of(const PreparedCall& call, const std::vector<at::Tensor>& made, at::TensorOptions options) {
  const auto one = [&](int64_t index) {
    return index == kEmpty ? at::empty({0}, options) : made[static_cast<size_t>(index)];
  };
  std::vector<c10::IValue> outputs;
  for (const Output& each : call.outputs) {
    if (const auto* index = std::get_if<int64_t>(&each)) {
      outputs.emplace_back(one(*index));
    } else {
      c10::List<at::Tensor> list;
      for (const int64_t index : std::get<std::vector<int64_t>>(each)) list.push_back(one(index));
      outputs.emplace_back(std::move(list));
    }
  }
  return outputs;
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
  std::shared_ptr<PreparedCalls> listed;  // freed, if nobody else has it, behind the lock
  std::lock_guard<std::mutex> guard(known().mutex);
  const auto found = known().find({group_, device_});
  if (found == known().calls.end() || (listed = found->second.lock()).get() != this) return false;
  known().calls.erase(found);
  return true;
}

std::shared_ptr<PreparedCalls> PreparedCalls::of(const std::string& group_name, c10::Device device) {
  if (forked) return nullptr;
  void* group = nullptr;
  try {
    group = address_of_group(group_name);
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

void PreparedCalls::add(c10::IntArrayRef key, std::shared_ptr<PreparedCall> call) {
  KeyTable<PreparedCall>::Entries dropped;
  std::lock_guard<std::mutex> guard(mutex_);
  if (key.front() != generation_) return;
  calls_.add(Key(key), call, dropped);
}

bool PreparedCalls::run(PreparedCall& call, const std::vector<at::Tensor>& tensors, std::vector<c10::IValue>& results) {
  const std::lock_guard<CallLock> guard(*lock_);
  const std::shared_ptr<const CallContext> context = context_;
  if (call.generation != generation_ || !context || context->is_broken()) return false;
  const int64_t before = *context->epoch;
  const int64_t sequence = call_ring().begin(
      {call.record, call.workspace, 0, ++*num_calls_, resets_, before, before, monotonic(), 0, "", {}});
  try {
    results = run_plan(call, *context, tensors);
  } catch (const std::exception&) {
    with_gil([&, error = std::current_exception()] {
      const auto& rescue = call.rescue->get();
      const auto told = rescue.attr("tell")(as_python(error)).cast<std::pair<std::string, std::vector<int64_t>>>();
      call_ring().end(sequence, *context->epoch, told.first, told.second);
      rescue.attr("dump")(told.first);
    });
    throw;
  }
  call_ring().end(sequence, *context->epoch);
  return true;
}

std::vector<c10::IValue> PreparedCalls::run_plan(PreparedCall& call, const CallContext& context,
                                                 const std::vector<at::Tensor>& tensors) const {
  const auto& rescue = *call.rescue;
  const int64_t number = *num_calls_;
  Rounds rounds(
      context.segments, context.epoch, call.fingerprint,
      [&](int64_t src_rank, int64_t epoch) {
        with_gil([&] { rescue.get().attr("wait")(src_rank, epoch, number); });
      },
      [&](int64_t epoch) { with_gil([&] { rescue.get().attr("check")(epoch); }); });
  try {
    return outputs_of(call, call.plan->run(tensors, rounds), tensors.front().options());
  } catch (const std::exception&) {
    // A wait that fails has told the peers what they must know. Ctrl-C may come before it begins.
    if (!context.is_broken()) with_gil([&] { rescue.get().attr("abandon")(as_python(std::current_exception())); });
    throw;
  }
}

}  // namespace fusedcomm

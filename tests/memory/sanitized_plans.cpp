// Threads as ranks whose calls are prepared: one lock for the threads of a rank, and the ring of calls, which another
// thread reads.
#include "../../kernels/cpu/symmetric_memory.cpp"
#include "../../kernels/cpu/plan.cpp"
#include "../../kernels/cpu/prepared_calls.cpp"

#include <torch/library.h>

#include <thread>

namespace fusedcomm {
namespace {

namespace py = pybind11;

constexpr int64_t kRanks = 3;
constexpr int64_t kNumel = 1024;  // elements in a chunk
constexpr int64_t kChunkBytes = kNumel * static_cast<int64_t>(sizeof(int));
constexpr int kCalls = 200;

// The header of a segment, then its slots.
constexpr int64_t kFlags = 0, kBroken = 128, kEpoch = 192, kSlots = 256;
constexpr int64_t kSlotBytes = kRanks * kChunkBytes;

// `copy_` in code that the sanitizer sees, as torch is built without it.
at::Tensor& copy(at::Tensor& to, const at::Tensor& from, bool) {
  std::copy_n(from.const_data_ptr<int>(), kNumel, to.data_ptr<int>());
  return to;
}

at::Tensor tensor_over(void* memory, int64_t num_bytes) { return at::from_blob(memory, {num_bytes}, at::kByte); }

struct Ranks {
  std::vector<void*> memory;
  std::vector<at::Tensor> segments;
  std::array<int64_t, kRanks> epochs{};
  int64_t no_error = 0;
  std::vector<c10::intrusive_ptr<c10d::ProcessGroup>> groups;

  Ranks() {
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      memory.push_back(allocator()->alloc(kSlots + kNumSlots * kSlotBytes, 0, std::nullopt));
      segments.push_back(tensor_over(memory.back(), kSlots + kNumSlots * kSlotBytes));
    }
  }
  ~Ranks() {
    for (void* each : memory) allocator()->free(each);
  }

  std::shared_ptr<const CallContext> context(int64_t rank) {
    std::vector<c10::Storage> storages;
    for (const auto& each : segments) storages.push_back(each.storage());
    const auto index = static_cast<size_t>(rank);
    return std::make_shared<const CallContext>(CallContext{
        {rank, kRanks, std::move(storages), kFlags, kBroken, kEpoch, kSlots, kSlotBytes},
        &epochs[index], &no_error});
  }
};

Place chunk(Place::Base base, int64_t index, int64_t number) {
  return {base, index, number * kChunkBytes, {kNumel}, {1}, at::kInt, {}};
}

Step of_rank(Step::Kind kind, int64_t rank) {
  Step step{kind};
  step.rank = rank;
  return step;
}

// Every rank sends its input to all, and the result has those of all.
std::shared_ptr<Plan> plan_of(int64_t rank) {
  const Place input = chunk(Place::kInput, 0, 0), whole{Place::kResult, 0, 0, {kRanks * kNumel}, {1}, at::kInt, {}};
  const auto plan = std::make_shared<Plan>(PlanDevice(), std::vector<Result>{{whole.sizes, at::kInt}}, 0,
                                           std::vector<int64_t>(), 0);
  for (int64_t i = 1; i < kRanks; ++i) {
    const int64_t dst = (rank + i) % kRanks;
    plan->append({Step::kCopy, {chunk(Place::kSlot, dst, rank), input}}, "");
    plan->append(of_rank(Step::kSignal, dst), "");
  }
  plan->append({Step::kCopy, {chunk(Place::kResult, 0, rank), input}}, "");
  for (int64_t i = 1; i < kRanks; ++i) {
    const int64_t src = (rank + i) % kRanks;
    plan->append(of_rank(Step::kWait, src), "");
    plan->append({Step::kCopy, {chunk(Place::kResult, 0, src), chunk(Place::kSlot, rank, src)}}, "");
  }
  plan->append(of_rank(Step::kEndRound, 0), "");
  plan->finish({whole});
  return plan;
}

// fusedcomm.ops.prepared.Rescue, for ranks that are only late.
py::object rescue(const std::shared_ptr<const CallContext>& context) {
  const auto wait = [context](int64_t src_rank, int64_t epoch, int64_t) {
    const Segments& segments = context->segments;
    const uintptr_t own = segments.address(segments.rank);
    const int64_t index = epoch % kNumSlots * kRanks + src_rank;
    const uintptr_t flag = own + static_cast<uintptr_t>(kFlags + index * static_cast<int64_t>(sizeof(int64_t)));
    const int64_t seen = wait_word(flag, epoch, own + kBroken, kRanks, 30);
    TORCH_CHECK(seen >> kFingerprintBits == epoch, "rank ", src_rank, " must signal round ", epoch);
  };
  const auto tell = [](const py::object& error) {
    return py::make_tuple(py::str(error), py::list());
  };
  return py::module_::import("types").attr("SimpleNamespace")(
      py::arg("wait") = py::cpp_function(wait), py::arg("tell") = py::cpp_function(tell),
      py::arg("check") = py::cpp_function([](int64_t) {}), py::arg("abandon") = py::cpp_function([](const py::object&) {}),
      py::arg("dump") = py::cpp_function([](const std::string&) {}));
}

std::string name_of(int64_t rank) { return "rank " + std::to_string(rank); }

std::shared_ptr<PreparedCalls> prepare(Ranks& ranks, int64_t rank) {
  ranks.groups.push_back(c10::make_intrusive<c10d::ProcessGroup>(static_cast<int>(rank), static_cast<int>(kRanks)));
  c10d::register_process_group(name_of(rank), ranks.groups.back());
  const py::object counters = py::module_::import("array").attr("array")("q", std::vector<int64_t>{0});
  const auto calls = std::make_shared<PreparedCalls>(name_of(rank), c10::Device(c10::kCPU), std::make_shared<CallLock>(),
                                                     py::buffer(counters));
  PreparedCalls::enlist(calls);
  const auto context = ranks.context(rank);
  calls->clear(context, 0);
  auto call = std::make_shared<PreparedCall>();
  call->plan = plan_of(rank);
  call->outputs = {0};
  call->generation = calls->generation();
  call->fingerprint = 5;
  call->record = std::make_shared<PythonObject>(py::none());
  call->workspace = std::make_shared<PythonObject>(py::none());
  call->rescue = std::make_unique<PythonObject>(rescue(context));
  calls->add(Key{calls->generation()}, std::move(call));
  return calls;
}

// Calls from several threads of a rank are all the same, as their order differs between ranks.
void make_calls(int64_t rank, bool same) {
  at::Tensor last;
  for (int number = 0; number < kCalls; ++number) {
    const int value = same ? 0 : number;
    const at::Tensor argument = at::empty({kNumel}, at::kInt);
    std::fill_n(argument.data_ptr<int>(), kNumel, value * static_cast<int>(kRanks) + static_cast<int>(rank));
    const auto calls = PreparedCalls::of(name_of(rank), c10::Device(c10::kCPU));
    const auto [call, is_known] = calls->find(Key{calls->generation()});
    std::vector<c10::IValue> results;
    TORCH_CHECK(call != nullptr && calls->run(*call, {argument}, results));
    last = results[0].toTensor();
    const int* values = last.const_data_ptr<int>();
    for (int64_t i = 0; i < kRanks * kNumel; ++i) {
      TORCH_CHECK(values[i] == value * kRanks + i / kNumel, "call ", number, " of rank ", rank, " is wrong");
    }
  }
}

void run_ranks(int num_threads) {
  std::vector<std::thread> threads;
  for (int64_t rank = 0; rank < kRanks; ++rank) {
    for (int i = 0; i < num_threads; ++i) {
      threads.emplace_back([rank, num_threads] { make_calls(rank, num_threads > 1); });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace fusedcomm

TORCH_LIBRARY_IMPL(aten, CPU, library) { library.impl("copy_", &fusedcomm::copy); }

extern "C" __attribute__((visibility("default"))) void run() {
  using namespace fusedcomm;
  register_symmetric_memory();
  const py::gil_scoped_acquire gil;
  std::vector<std::shared_ptr<PreparedCalls>> prepared;
  {
    Ranks ranks;
    for (int64_t rank = 0; rank < kRanks; ++rank) prepared.push_back(prepare(ranks, rank));
    {
      WithoutGil without;
      std::atomic<bool> over{false};
      std::thread reader([&over] {
        while (!over) {
          for (const RecordedCall& call : call_ring().calls()) TORCH_CHECK(call.ended == 0 || call.ended >= call.started);
        }
      });
      run_ranks(1);
      run_ranks(2);
      over = true;
      reader.join();
    }
    for (int64_t rank = 0; rank < kRanks; ++rank) {
      TORCH_CHECK(ranks.epochs[static_cast<size_t>(rank)] == 3 * kCalls);
      prepared[static_cast<size_t>(rank)]->withdraw();
    }
    call_ring().clear();
    prepared.clear();
  }
}

// Threads that make results in a heap, write and hand them on, while others free, trim, fork and warm.
#include "../../kernels/cpu/results_heap.cpp"
#include "../../kernels/cpu/symmetric_memory.cpp"

#include <sys/wait.h>

namespace fusedcomm {
namespace {

constexpr int kThreads = 4;
constexpr int kSteps = 400;
constexpr int kForks = 8;

struct Shared {
  ResultsHeap& heap;
  std::mutex mutex;
  std::vector<at::Tensor> handed_on;  // freed by another thread than the one that made them
  std::atomic<int> num_placed{0};
};

void make_results(Shared& shared, int number) {
  for (int step = 0; step < kSteps; ++step) {
    at::Tensor result = shared.heap.empty({1 + 2000 * (step % 3)}, at::kInt);
    int* values = result.data_ptr<int>();
    for (int64_t i = 0; i < result.numel(); ++i) values[i] = number;
    for (int64_t i = 0; i < result.numel(); ++i) TORCH_CHECK(values[i] == number);
    if (shared.heap.place(result)) ++shared.num_placed;
    std::lock_guard<std::mutex> lock(shared.mutex);
    shared.handed_on.push_back(std::move(result));
    if (shared.handed_on.size() > 8) shared.handed_on.erase(shared.handed_on.begin());
  }
}

void trim(Shared& shared) {
  for (int step = 0; step < kSteps / 10; ++step) {
    shared.heap.trim(static_cast<size_t>(step % 4) * page_bytes());
    TORCH_CHECK(shared.heap.stats().live_bytes % page_bytes() == 0);
  }
}

// The child uses the heap, so it needs the lock.
void fork_children(Shared& shared) {
  for (int step = 0; step < kForks; ++step) {
    const at::Tensor result = shared.heap.empty({100}, at::kInt);
    result.data_ptr<int>()[0] = 1;
    const pid_t child = fork();
    if (child == 0) {
      result.data_ptr<int>()[0] = 2;
      _exit(shared.heap.stats().live_bytes > 0 || !shared.heap.place(result) ? 0 : 1);
    }
    int status = -1;
    TORCH_CHECK(waitpid(child, &status, 0) == child && status == 0);
    TORCH_CHECK(result.data_ptr<int>()[0] == 1);
  }
}

// Peers write while the pages are touched.
void warm_in_use() {
  const auto segment = Segment::create(1 << 20);
  const auto mapped_again = Segment::open(segment->address());
  auto* words = static_cast<int64_t*>(segment->base());
  const auto again = reinterpret_cast<uintptr_t>(mapped_again->base());
  std::thread writer([words] {
    for (int64_t i = 0; i < 1 << 17; ++i) __atomic_store_n(words + i, i, __ATOMIC_RELAXED);
  });
  for (int step = 0; step < 20; ++step) {
    warm(again, 1 << 20);
    touch(again, again + (1 << 20), page_bytes());
  }
  writer.join();
  for (int64_t i = 0; i < 1 << 17; ++i) TORCH_CHECK(words[i] == i);
}

}  // namespace
}  // namespace fusedcomm

extern "C" __attribute__((visibility("default"))) void run() {
  using namespace fusedcomm;
  register_symmetric_memory();
  WithoutGil gil;
  void* memory = allocator()->alloc(1 << 20, 0, std::nullopt);
  auto heap = std::make_unique<ResultsHeap>(at::from_blob(memory, {1 << 20}, at::kByte), 0);
  Shared shared{*heap, {}, {}};
  std::vector<std::thread> threads;
  for (int number = 0; number < kThreads; ++number) threads.emplace_back(make_results, std::ref(shared), number);
  threads.emplace_back(trim, std::ref(shared));
  threads.emplace_back(fork_children, std::ref(shared));
  for (std::thread& thread : threads) thread.join();
  TORCH_CHECK(shared.num_placed > 0);
  allocator()->free(memory);
  heap.reset();
  shared.handed_on.clear();  // the last of them unmaps the memory
  warm_in_use();
}

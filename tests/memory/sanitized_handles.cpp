// Threads as ranks: their rendezvous on one store, and the barriers and signals of their handles.
#include "../../kernels/cpu/symmetric_memory.cpp"

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace fusedcomm {
namespace {

constexpr int kRanks = 3;
constexpr int kRounds = 30;

void meet(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  const Group group{"threads", rank, kRanks, store, 1};
  for (int attempt = 0; attempt < 3; ++attempt) {
    const auto buffer = Segment::create(64);
    const auto pad = Segment::create(64);
    WithoutGil gil;
    Rendezvous rendezvous(group, gil);
    const auto offers = rendezvous.exchange({pad->address(), buffer->address(), 0, hash_host(), hash_pid_namespace()});
    TORCH_CHECK(mismatch(offers).empty());
    for (const Offer& offer : offers) Segment::open(offer.buffer);
    for (const std::string& text : rendezvous.acknowledge("ok")) TORCH_CHECK(text == "ok", text);
  }
}

void use(const Handle::Segments& buffers, const Handle::Segments& pads, int rank) {
  Handle handle({"threads", rank, kRanks, nullptr, 1}, buffers, pads, 0);
  const int next = (rank + 1) % kRanks;
  const int last = (rank + kRanks - 1) % kRanks;
  const auto word = [&](int of) { return static_cast<int64_t*>(handle.get_buffer_ptrs()[static_cast<size_t>(of)]); };
  for (int round = 0; round < kRounds; ++round) {
    *word(next) = round * kRanks + rank;
    handle.barrier(0, 60000);
    TORCH_CHECK(*word(rank) == round * kRanks + last);
    handle.barrier(1, 60000);
    *word(next) = -rank;
    handle.put_signal(next, 2, 60000);
    handle.wait_signal(last, 2, 60000);
    TORCH_CHECK(*word(rank) == -last);
    handle.barrier(0, 60000);
  }
}

template <class Body>
void in_threads(Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back([body, rank] { body(rank); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace fusedcomm

extern "C" __attribute__((visibility("default"))) void run() {
  using namespace fusedcomm;
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  in_threads([&](int rank) { meet(store, rank); });
  Handle::Segments buffers;
  Handle::Segments pads;
  for (int rank = 0; rank < kRanks; ++rank) {
    buffers.push_back(Segment::create(64));
    pads.push_back(Segment::create(4096));
  }
  in_threads([&](int rank) { use(buffers, pads, rank); });
}

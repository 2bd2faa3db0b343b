// Threads as ranks on one mapping, where ThreadSanitizer sees whether signal and wait order what is between them.
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../../kernels/cpu/flags.h"
#include "../../kernels/cpu/segment.h"

namespace {

constexpr int kRanks = 4;
constexpr int64_t kRounds = 200;
constexpr int kNumel = 16;

struct Rank {
  int64_t flags[2][kRanks];  // by slot and source, as in a workspace
  int64_t slots[2][kRanks][kNumel];
  int64_t* broken;  // memory of its own: a sanitizer sees what is read beyond it
};

uintptr_t address(const int64_t* word) { return reinterpret_cast<uintptr_t>(word); }

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

void run_rank(Rank* ranks, int rank) {
  fusedcomm::WithoutGil gil;
  for (int64_t epoch = 1; epoch <= kRounds; ++epoch) {
    const int64_t slot = epoch % 2;
    for (int dst = 0; dst < kRanks; ++dst) {
      for (int64_t& element : ranks[dst].slots[slot][rank]) element = epoch * kRanks + rank;
      fusedcomm::signal_word(address(&ranks[dst].flags[slot][rank]), epoch << fusedcomm::kFingerprintBits);
    }
    for (int src = 0; src < kRanks; ++src) {
      Rank& mine = ranks[rank];
      const int64_t flag =
          fusedcomm::wait_word(address(&mine.flags[slot][src]), epoch, address(mine.broken), kRanks, 60);
      require(flag == epoch << fusedcomm::kFingerprintBits, "a signal must come, with its epoch");
      for (const int64_t element : mine.slots[slot][src]) require(element == epoch * kRanks + src, "wrong data");
    }
  }
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void run() {
  const auto segment = fusedcomm::Segment::create(kRanks * sizeof(Rank));
  const auto again = fusedcomm::Segment::open(segment->address());
  auto* ranks = static_cast<Rank*>(segment->base());
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks[rank].broken = new int64_t[kRanks]();
    ranks[rank].broken[rank] = 1 | (kRounds + 1) << fusedcomm::kKindBits;  // a failure in a later round
  }
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) threads.emplace_back(run_rank, ranks, rank);
  for (std::thread& thread : threads) thread.join();
  require(static_cast<Rank*>(again->base())->flags[0][0] != 0, "two mappings must be of one memory");
  for (int rank = 0; rank < kRanks; ++rank) delete[] ranks[rank].broken;
}

// Preloaded, it lets gloo's two threads come back from torch's opTypeToString at once, as chance does now and then.

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

namespace c10d {

enum class OpType : std::uint8_t {};

std::string opTypeToString(OpType op) {
  static std::atomic<int> come{0};
  constexpr OpType kAllgatherCoalesced{6};
  char thread[16];
  pthread_getname_np(pthread_self(), thread, sizeof(thread));
  if (std::string(thread) == "pt_gloo_runloop") {
    const int mine = come.fetch_add(1);
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(2);
    while (come < (mine | 1) + 1 && std::chrono::steady_clock::now() < end) {
    }
    int alone = mine + 1;  // nobody came: the next two are a pair
    if (alone % 2 != 0) come.compare_exchange_strong(alone, mine + 2);
  }
  return op == kAllgatherCoalesced ? "ALLGATHER_COALESCED" : "ALLREDUCE";
}

}  // namespace c10d

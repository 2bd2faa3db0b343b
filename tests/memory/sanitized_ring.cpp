// A thread that records calls while another forks: a child finds the ring free, and reads it.
#include <c10/util/Exception.h>
#include <sys/wait.h>

#include <atomic>
#include <thread>

#include "../../kernels/cpu/call_ring.h"

namespace fusedcomm {
namespace {

constexpr int kForks = 40;
constexpr unsigned kChildS = 20;

// Without memory of its own: a child may find a sanitizer's allocator locked.
void record_calls(const std::atomic<bool>& stop) {
  while (!stop) call_ring().end(call_ring().begin(RecordedCall{}), 1);
}

bool child_reads() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(kChildS);
    _exit(call_ring().calls().empty() ? 1 : 0);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

}  // namespace
}  // namespace fusedcomm

extern "C" __attribute__((visibility("default"))) void run() {
  using namespace fusedcomm;
  std::atomic<bool> stop{false};
  call_ring().begin(RecordedCall{});
  std::thread thread(record_calls, std::cref(stop));
  bool all = true;
  for (int i = 0; i < kForks && all; ++i) all = child_reads();
  stop = true;
  thread.join();
  TORCH_CHECK(all, "a child must find the ring of calls free");
}

// The CPU backend of torch.distributed._symmetric_memory: tensors in segments that the peers map.
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "gil.h"
#include "group.h"
#include "rendezvous.h"
#include "segment.h"
#include "spin.h"

namespace fusedcomm {
namespace {

namespace symm_mem = c10d::symmetric_memory;

constexpr const char* kBackend = "FUSEDCOMM_CPU";

// What rendezvous() returns: this rank's view of the segments of all ranks. The pad has one 32-bit word per (channel,
// src_rank), which is 1 from signal to wait. It belongs to this handle alone: groups that share a buffer share no
// signals.
class Handle final : public symm_mem::SymmetricMemory {
 public:
  using Segments = std::vector<std::shared_ptr<Segment>>;

  Handle(const Group& group, Segments buffers, Segments pads, size_t offset)
      : group_name_(group.name), rank_(group.rank), group_size_(group.size), offset_(offset),
        buffers_(std::move(buffers)), pads_(std::move(pads)) {
    for (const auto& buffer : buffers_) buffer_ptrs_.push_back(buffer->base());
    for (const auto& pad : pads_) pad_ptrs_.push_back(pad->base());
  }

  std::vector<void*> get_buffer_ptrs() override { return buffer_ptrs_; }
  std::vector<void*> get_signal_pad_ptrs() override { return pad_ptrs_; }
  void** get_buffer_ptrs_dev() override { return buffer_ptrs_.data(); }
  void** get_signal_pad_ptrs_dev() override { return pad_ptrs_.data(); }
  size_t get_buffer_size() override { return buffers_[static_cast<size_t>(rank_)]->num_bytes(); }
  bool has_multicast_support() override { return false; }
  void* get_multicast_ptr() override { return nullptr; }
  int get_rank() override { return rank_; }
  int get_world_size() override { return group_size_; }
  c10::Device get_device() override { return c10::Device(c10::kCPU); }
  // These are not in the interface of every torch release, so they are not marked `override`.
  size_t get_offset() { return offset_; }
  bool world_within_direct_access() { return true; }

  void barrier(int channel, size_t timeout_ms) override;
  void put_signal(int dst_rank, int channel, size_t timeout_ms) override;
  void wait_signal(int src_rank, int channel, size_t timeout_ms) override;

 private:
  uint32_t* word(int on_rank, int src_rank, int channel) const {
    const auto index = static_cast<size_t>(channel) * static_cast<size_t>(group_size_) + static_cast<size_t>(src_rank);
    return static_cast<uint32_t*>(pad_ptrs_[static_cast<size_t>(on_rank)]) + index;
  }
  uint32_t* sent_to(int peer, int channel) const { return word(peer, rank_, channel); }
  uint32_t* received_from(int peer, int channel) const { return word(rank_, peer, channel); }

  void check_channel(int channel) const;
  void check_rank(const char* name, int rank) const;
  void undo_barrier(int channel, int num_sent, int num_received) const;
  std::string describe(const char* what, int channel, size_t timeout_ms) const;

  std::string group_name_;
  int rank_;
  int group_size_;
  size_t offset_;
  Segments buffers_;
  Segments pads_;
  std::vector<void*> buffer_ptrs_;
  std::vector<void*> pad_ptrs_;
};

bool flip(uint32_t* word, uint32_t from) {
  return __atomic_compare_exchange_n(word, &from, 1 - from, false, __ATOMIC_SEQ_CST, __ATOMIC_RELAXED);
}

bool flip_in_time(uint32_t* word, uint32_t from, Spin& spin) {
  while (!flip(word, from)) {
    if (!spin.again()) return false;
  }
  return true;
}

Spin make_spin(size_t timeout_ms, WithoutGil& gil) {
  return Spin(timeout_ms == 0 ? Spin::kForever : static_cast<double>(timeout_ms) * 1e-3, gil);
}

void Handle::check_channel(int channel) const {
  const size_t num_channels = pads_[0]->num_bytes() / sizeof(uint32_t) / static_cast<size_t>(group_size_);
  TORCH_CHECK_VALUE(channel >= 0 && static_cast<size_t>(channel) < num_channels, "channel must be in [0, ",
                    num_channels, ") for a group of ", group_size_, ", got ", channel);
}

void Handle::check_rank(const char* name, int rank) const {
  TORCH_CHECK_VALUE(rank >= 0 && rank < group_size_, name, " must be in [0, ", group_size_, "), got ", rank);
}

std::string Handle::describe(const char* what, int channel, size_t timeout_ms) const {
  return c10::str(what, " timed out after ", timeout_ms, " ms on rank ", rank_, " of group '", group_name_,
                  "', channel ", channel, ": ");
}

void Handle::put_signal(int dst_rank, int channel, size_t timeout_ms) {
  check_rank("dst_rank", dst_rank);
  check_channel(channel);
  WithoutGil gil;
  Spin spin = make_spin(timeout_ms, gil);
  TORCH_CHECK(flip_in_time(sent_to(dst_rank, channel), 0, spin), describe("put_signal", channel, timeout_ms), "rank ",
              dst_rank, " has not waited for the signal before");
}

void Handle::wait_signal(int src_rank, int channel, size_t timeout_ms) {
  check_rank("src_rank", src_rank);
  check_channel(channel);
  WithoutGil gil;
  Spin spin = make_spin(timeout_ms, gil);
  TORCH_CHECK(flip_in_time(received_from(src_rank, channel), 1, spin), describe("wait_signal", channel, timeout_ms),
              "no signal from rank ", src_rank);
}

// Sends a signal to each peer, then waits for each peer's.
void Handle::barrier(int channel, size_t timeout_ms) {
  check_channel(channel);
  WithoutGil gil;
  Spin spin = make_spin(timeout_ms, gil);
  int num_sent = 0;
  int num_received = 0;
  const auto peer = [this](int step) { return (rank_ + step) % group_size_; };
  try {
    for (; num_sent < group_size_ - 1; ++num_sent) {
      const int dst_rank = peer(num_sent + 1);
      TORCH_CHECK(flip_in_time(sent_to(dst_rank, channel), 0, spin), describe("barrier", channel, timeout_ms), "rank ",
                  dst_rank, " has not waited for the signal before");
    }
    for (; num_received < group_size_ - 1; ++num_received) {
      const int src_rank = peer(num_received + 1);
      TORCH_CHECK(flip_in_time(received_from(src_rank, channel), 1, spin), describe("barrier", channel, timeout_ms),
                  "rank ", src_rank, " has not come");
    }
  } catch (...) {
    undo_barrier(channel, num_sent, num_received);
    throw;
  }
}

// Leaves no signal of a barrier that failed, so that it can be tried again: between two ranks each signal is taken by
// its receiver or withdrawn. A peer that has taken this rank's signal had sent its own before.
void Handle::undo_barrier(int channel, int num_sent, int num_received) const {
  for (int step = 1; step <= num_sent; ++step) {
    const int peer = (rank_ + step) % group_size_;
    const bool taken = !flip(sent_to(peer, channel), 1);
    if (taken && step > num_received) flip(received_from(peer, channel), 1);
  }
}

// A cached handle, valid while the group of that name is the one it was made for.
struct CachedHandle {
  uint64_t identity;
  size_t offset;
  c10::intrusive_ptr<Handle> handle;
};

struct Allocation {
  std::shared_ptr<Segment> segment;
  std::optional<std::string> group_name;
  std::map<std::string, CachedHandle> handles;  // by group name
};

constexpr int64_t kNothing = -1;  // the descriptor in the offer of a rank that has no memory to offer

// Why these offers do not fit together, the same text on every rank; "" if they do.
std::string mismatch(const std::vector<Offer>& offers) {
  const auto differ = [&](const char* what, auto&& get) -> std::string {
    for (size_t rank = 1; rank < offers.size(); ++rank) {
      if (get(offers[rank]) != get(offers[0])) {
        return c10::str(what, " must be equal on all ranks, got ", get(offers[0]), " on rank 0 and ",
                        get(offers[rank]), " on rank ", rank);
      }
    }
    return "";
  };
  for (const std::string& text :
       {differ("host (hash of FUSEDCOMM_HOST_ID or of the boot id)", [](const Offer& offer) { return offer.host; }),
        differ("pid namespace (hash)", [](const Offer& offer) { return offer.pid_namespace; }),
        differ("size in bytes of the allocation", [](const Offer& offer) { return offer.buffer.num_bytes; }),
        differ("offset in bytes in the allocation", [](const Offer& offer) { return offer.offset; }),
        differ("signal pad size", [](const Offer& offer) { return offer.pad.num_bytes; })}) {
    if (!text.empty()) return text;
  }
  return "";
}

uint64_t hash_host() {
  const char* given = std::getenv("FUSEDCOMM_HOST_ID");
  if (given != nullptr && *given != '\0') return hash_bytes(given, std::strlen(given));
  const char* path = "/proc/sys/kernel/random/boot_id";
  char boot_id[64] = {};
  FILE* file = std::fopen(path, "re");
  if (file == nullptr) throw system_error(std::string("cannot open ") + path);
  if (std::fgets(boot_id, sizeof(boot_id), file) == nullptr) boot_id[0] = '\0';
  std::fclose(file);
  return hash_bytes(boot_id, sizeof(boot_id));
}

uint64_t hash_pid_namespace() {
  const std::string name = read_link("/proc/self/ns/pid");
  return hash_bytes(name.data(), name.size());
}

class Allocator final : public symm_mem::SymmetricMemoryAllocator {
 public:
  void* alloc(size_t size, int, const std::optional<std::string>& group_name) override;
  void free(void* ptr) noexcept override;
  size_t get_alloc_size(void* ptr) override;
  c10::intrusive_ptr<symm_mem::SymmetricMemory> rendezvous(void* ptr,
                                                           const std::optional<std::string>& group_name) override;
  bool has_multicast_support(int) override { return false; }
  c10::DeviceType supported_device_type() override { return c10::kCPU; }
  std::string name() override { return kBackend; }
  // It is not in the interface of every torch release.
  bool has_allocation(void* ptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(ptr) != allocations_.end();
  }

 private:
  using Allocations = std::map<uintptr_t, Allocation>;  // by address

  // Returns the allocation that contains this address.
  Allocations::iterator find(void* ptr);
  c10::intrusive_ptr<Handle> connect(const Group& group, const std::shared_ptr<Segment>& buffer, size_t offset);

  std::mutex mutex_;  // never held while waiting for a peer or for the GIL
  Allocations allocations_;
};

Allocator::Allocations::iterator Allocator::find(void* ptr) {
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  auto it = allocations_.upper_bound(address);
  if (it == allocations_.begin()) return allocations_.end();
  --it;
  const size_t num_bytes = std::max<size_t>(it->second.segment->num_bytes(), 1);
  return address - it->first < num_bytes ? it : allocations_.end();
}

void* Allocator::alloc(size_t size, int, const std::optional<std::string>& group_name) {
  std::shared_ptr<Segment> segment;
  try {
    segment = Segment::create(size);
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "CPU symmetric memory: ", error.what());
  }
  std::lock_guard<std::mutex> lock(mutex_);
  allocations_[reinterpret_cast<uintptr_t>(segment->base())] = {segment, group_name, {}};
  return segment->base();
}

// The memory stays as long as a handle of it does.
void Allocator::free(void* ptr) noexcept {
  Allocations::node_type freed;
  std::lock_guard<std::mutex> lock(mutex_);
  freed = allocations_.extract(reinterpret_cast<uintptr_t>(ptr));
}

size_t Allocator::get_alloc_size(void* ptr) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = find(ptr);
  TORCH_CHECK(it != allocations_.end(), "CPU symmetric memory: not an allocation: ", ptr);
  return it->second.segment->num_bytes();
}

// This is a collective, unless this rank holds a handle for (allocation, live group). It returns null for memory that
// is not allocated here, as torch wants it.
c10::intrusive_ptr<symm_mem::SymmetricMemory> Allocator::rendezvous(void* ptr,
                                                                    const std::optional<std::string>& group_name) {
  std::shared_ptr<Segment> buffer;
  std::optional<std::string> name = group_name;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = find(ptr);
    if (it == allocations_.end()) return nullptr;
    buffer = it->second.segment;
    if (!name) name = it->second.group_name;
  }
  TORCH_CHECK_VALUE(name.has_value(), "group must be given to rendezvous() or to the allocation, got neither");
  const Group group = find_group(*name);
  const size_t offset = static_cast<size_t>(static_cast<char*>(ptr) - static_cast<char*>(buffer->base()));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto it = find(ptr);
    if (it != allocations_.end()) {
      const auto cached = it->second.handles.find(*name);
      if (cached != it->second.handles.end() && cached->second.identity == group.identity &&
          cached->second.offset == offset) {
        return cached->second.handle;
      }
    }
  }
  auto handle = connect(group, buffer, offset);
  CachedHandle replaced{group.identity, offset, handle};  // the stale handle is released after the lock
  std::lock_guard<std::mutex> lock(mutex_);
  const auto it = find(ptr);
  if (it != allocations_.end() && it->second.segment == buffer) std::swap(it->second.handles[*name], replaced);
  return handle;
}

c10::intrusive_ptr<Handle> Allocator::connect(const Group& group, const std::shared_ptr<Segment>& buffer,
                                              size_t offset) {
  std::shared_ptr<Segment> pad;
  Offer mine{};
  std::string error;
  try {
    pad = Segment::create(symm_mem::get_signal_pad_size());
    mine = {pad->address(), buffer->address(), offset, hash_host(), hash_pid_namespace()};
  } catch (const std::exception& failure) {  // the peers wait to hear of it
    error = c10::str("rank ", group.rank, " has nothing to offer: ", failure.what());
    mine.pad = {random_id(), 0, 0, kNothing};
  }
  Handle::Segments buffers{buffer};
  Handle::Segments pads{pad};
  std::vector<std::string> errors{error.empty() ? "ok" : error};
  const std::string where =
      c10::str("rendezvous of CPU symmetric memory in group '", group.name, "' on rank ", group.rank, ": ");
  if (group.size > 1) {
    try {
      WithoutGil gil;
      Rendezvous attempt(group, gil);
      const auto offers = attempt.exchange(mine);
      const bool complete =
          std::all_of(offers.begin(), offers.end(), [](const Offer& offer) { return offer.pad.fd != kNothing; });
      if (complete) error = mismatch(offers);
      const bool fits = complete && error.empty();
      buffers.clear();
      pads.clear();
      for (size_t rank = 0; fits && error.empty() && rank < offers.size(); ++rank) {
        const bool local = static_cast<int>(rank) == group.rank;
        try {
          buffers.push_back(local ? buffer : Segment::open(offers[rank].buffer));
          pads.push_back(local ? pad : Segment::open(offers[rank].pad));
        } catch (const std::exception& failure) {
          error = c10::str("rank ", group.rank, " cannot use the memory of rank ", rank, ": ", failure.what());
        }
      }
      errors = attempt.acknowledge(error.empty() ? "ok" : error);
    } catch (const c10::DistStoreError& error) {
      C10_THROW_ERROR(DistStoreError, where + error.what_without_backtrace());
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, where, "the store failed: ", error.what_without_backtrace());
    }
  }
  for (const std::string& each : errors) TORCH_CHECK(each == "ok", where, each);
  pad->close_fd();
  return c10::make_intrusive<Handle>(group, std::move(buffers), std::move(pads), offset);
}

const c10::intrusive_ptr<Allocator>& allocator() {
  static const auto only = c10::make_intrusive<Allocator>();
  return only;
}

}  // namespace

void* address_of_group(const std::string& name) { return c10d::resolve_process_group(name).get(); }

// A backend that someone else has registered for CPU stays the one in use; set_backend(kBackend) selects this one.
void register_symmetric_memory() {
  symm_mem::register_availability(kBackend, allocator());
  if (!symm_mem::has_allocator(c10::kCPU)) symm_mem::register_allocator(c10::kCPU, allocator());
}

}  // namespace fusedcomm

// Anonymous shared memory. A segment is a memfd: the kernel frees it with its last user, however that process ends. Its
// size is sealed: if it could be cut off under the ranks that have mapped it, their next access would kill them.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

namespace fusedcomm {

// Where a peer finds a segment: /proc/<pid>/fd/<fd>. The random id is in the memfd's name, so that a number that
// means something else by now (or on another host) is told apart from the segment before it is mapped.
struct SegmentAddress {
  uint64_t id;
  uint64_t num_bytes;
  int64_t pid;
  int64_t fd;
};

class Segment {
 public:
  static std::shared_ptr<Segment> create(size_t num_bytes);
  static std::shared_ptr<Segment> open(const SegmentAddress& address);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    if (base_ != nullptr) munmap(base_, mapped_bytes());
    close_fd();
  }

  void* base() const { return base_; }
  size_t num_bytes() const { return num_bytes_; }
  SegmentAddress address() const { return {id_, num_bytes_, getpid(), fd_}; }

  // After this no further process can map the segment.
  void close_fd() noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
  }

 private:
  Segment(uint64_t id, size_t num_bytes, int fd) : id_(id), num_bytes_(num_bytes), fd_(fd) {}

  size_t mapped_bytes() const {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    return num_bytes_ == 0 ? page : (num_bytes_ + page - 1) / page * page;
  }

  void seal() const;
  void check_sealed(const std::string& path) const;
  void map();

  uint64_t id_;
  size_t num_bytes_;
  int fd_;  // -1 once it is closed
  void* base_ = nullptr;
};

inline std::runtime_error system_error(const std::string& what) {
  return std::runtime_error(what + ": " + std::strerror(errno));
}

inline uint64_t random_id() {
  uint64_t id = 0;
  while (getrandom(&id, sizeof(id), 0) != static_cast<ssize_t>(sizeof(id))) {
    if (errno != EINTR) throw system_error("getrandom");
  }
  return id;
}

inline std::string segment_name(uint64_t id) {
  char name[40];
  std::snprintf(name, sizeof(name), "fusedcomm-%016llx", static_cast<unsigned long long>(id));
  return name;
}

inline std::string read_link(const std::string& path) {
  char target[256];
  const ssize_t length = readlink(path.c_str(), target, sizeof(target));
  return std::string(target, length > 0 ? static_cast<size_t>(length) : 0);
}

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

inline void Segment::seal() const {
  if (fchmod(fd_, S_IRUSR | S_IWUSR) != 0) throw system_error("cannot restrict a segment to its owner");
  if (fcntl(fd_, F_ADD_SEALS, kSeals) != 0) throw system_error("cannot seal a segment");
}

inline void Segment::check_sealed(const std::string& path) const {
  struct stat facts;
  if (fstat(fd_, &facts) != 0) throw system_error("cannot look at " + path);
  const int seals = fcntl(fd_, F_GET_SEALS);  // -1 where it is no memfd
  const auto found_bytes = static_cast<size_t>(facts.st_size);
  if (seals >= 0 && (seals & kSeals) == kSeals && facts.st_uid == geteuid() && found_bytes >= mapped_bytes()) return;
  char text[160];
  std::snprintf(text, sizeof(text), " must be sealed memory of user %u of at least %zu bytes, got user %u, %zu bytes, ",
                geteuid(), mapped_bytes(), facts.st_uid, found_bytes);
  throw std::runtime_error(path + text + (seals >= 0 ? "seals " + std::to_string(seals) : "no seals"));
}

inline void Segment::map() {
  void* base = mmap(nullptr, mapped_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (base == MAP_FAILED) throw system_error("cannot map " + std::to_string(num_bytes_) + " bytes");
  base_ = base;
}

inline std::shared_ptr<Segment> Segment::create(size_t num_bytes) {
  const uint64_t id = random_id();
  const int fd = memfd_create(segment_name(id).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0) throw system_error("memfd_create");
  std::shared_ptr<Segment> segment(new Segment(id, num_bytes, fd));
  if (ftruncate(fd, static_cast<off_t>(segment->mapped_bytes())) != 0) {
    throw system_error("cannot allocate " + std::to_string(num_bytes) + " bytes");
  }
  segment->seal();
  segment->map();
  return segment;
}

inline std::shared_ptr<Segment> Segment::open(const SegmentAddress& address) {
  const std::string path = "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
  const std::string name = "/memfd:" + segment_name(address.id) + " (deleted)";
  const std::string advice = "; the processes must run on one host, in one pid namespace, as one user, and be alive";

  errno = 0;
  const std::string found = read_link(path);  // first, because opening a stranger's pipe or device has effects
  if (found.empty()) throw std::runtime_error(system_error("cannot read " + path).what() + advice);
  if (found != name) throw std::runtime_error(path + " is " + found + " and not " + name + advice);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw std::runtime_error(system_error("cannot open " + path).what() + advice);

  std::shared_ptr<Segment> segment(new Segment(address.id, address.num_bytes, fd));
  if (read_link("/proc/self/fd/" + std::to_string(fd)) != name) {  // the number was reused in between
    throw std::runtime_error(path + " is no longer " + name + advice);
  }
  segment->check_sealed(path);
  segment->map();
  segment->close_fd();
  return segment;
}

}  // namespace fusedcomm

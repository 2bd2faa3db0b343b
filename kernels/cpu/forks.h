// Which forked children of this process are still there.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cstdint>

#include "pages.h"

namespace fusedcomm {

// Each fork maps an empty file of its own, which only the child keeps mapped. The system lets a file be sealed against
// writes when no process has it mapped for writing any more. A mapping goes with its process, or when that begins
// another program, and a child of the child has it too, whatever descriptors they close. All is done by system calls, as
// a child may not allocate. Callers hold a lock.
class Forks {
 public:
  // Forks so far.
  uint64_t count() const { return count_; }
  // Rises when children have gone: only then may `may_read` say something else.
  uint64_t num_looks_that_found() const { return num_found_; }

  // Whether a child that was forked after `from` forks, and not after `to`, may still be there.
  bool may_read(uint64_t from, uint64_t to) const {
    if (from < last_unwatched_) return true;
    for (const Watch& watch : watches_) {
      if (watch.fd >= 0 && watch.first <= to && from < watch.last) return true;
    }
    return false;
  }

  // Finds children that have gone.
  void look() {
    for (Watch& watch : watches_) {
      if (watch.fd < 0 || fcntl(watch.fd, F_ADD_SEALS, F_SEAL_WRITE) != 0) continue;
      close(watch.fd);
      watch.fd = -1;
      ++num_found_;
    }
  }

  // `watched`: whether there is anything that the child may read.
  void before(bool watched) {
    ++count_;
    if (!watched) return;
    look();
    Watch* watch = open_watch();
    mapped_ = watch == nullptr
                  ? MAP_FAILED
                  : mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, watch->fd, 0);  // never touched
    if (mapped_ == MAP_FAILED) {
      last_unwatched_ = count_;
    } else {
      watch->last = count_;
    }
  }

  void in_parent() {
    if (mapped_ != MAP_FAILED) munmap(mapped_, page_bytes());
    mapped_ = MAP_FAILED;
  }

  void in_child() {
    mapped_ = MAP_FAILED;  // it stays mapped
    for (Watch& watch : watches_) {
      if (watch.fd >= 0) close(watch.fd);
      watch.fd = -1;
    }
  }

 private:
  struct Watch {
    int fd = -1;  // -1: none
    uint64_t first = 0;
    uint64_t last = 0;
  };

  // A watch of this fork's own; the newest one where there are as many as there may be, or no descriptor is left; null
  // where there is none.
  Watch* open_watch() {
    Watch* newest = nullptr;
    for (Watch& watch : watches_) {
      if (watch.fd >= 0) {
        if (newest == nullptr || watch.last > newest->last) newest = &watch;
        continue;
      }
      watch.fd = memfd_create("fork-watch-of-fusedcomm", MFD_CLOEXEC | MFD_ALLOW_SEALING);
      if (watch.fd < 0) continue;
      watch.first = count_;
      return &watch;
    }
    return newest;
  }

  std::array<Watch, 8> watches_;
  uint64_t count_ = 0;
  uint64_t num_found_ = 0;
  uint64_t last_unwatched_ = 0;
  void* mapped_ = MAP_FAILED;  // while this process forks
};

}  // namespace fusedcomm

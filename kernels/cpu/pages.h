// Pages of fresh memory: a fault per 4 KiB costs more than the copy that fills them. So they are large, or warm: there,
// and mapped for writing, before anything is written.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

#ifndef MADV_POPULATE_WRITE  // the system or its headers may be older than Linux 5.14
#define MADV_POPULATE_WRITE 23
#endif

namespace fusedcomm {

inline uintptr_t page_bytes() {
  static const auto bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

// Asks for huge pages inside [address, address + num_bytes); without effect where the system has none.
inline void prefer_huge_pages(uintptr_t address, uintptr_t num_bytes) {
  constexpr uintptr_t kHugePage = 2u << 20;
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + num_bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

// Writes each page as it is, whoever else writes there at the same time.
inline void touch(uintptr_t begin, uintptr_t end, uintptr_t page_size) {
  for (uintptr_t page = begin; page < end; page += page_size) {
    __atomic_fetch_or(reinterpret_cast<uint8_t*>(page), uint8_t{0}, __ATOMIC_RELAXED);
  }
}

// Maps every page that [address, address + num_bytes) touches for writing. No contents change. If the system has no
// memory left, that is no error: the page faults come later then.
inline void warm(uintptr_t address, uintptr_t num_bytes) {
  if (num_bytes == 0) return;
  const uintptr_t page_size = page_bytes();
  const uintptr_t begin = address / page_size * page_size;
  const uintptr_t end = (address + num_bytes + page_size - 1) / page_size * page_size;
  const int failed = madvise(reinterpret_cast<void*>(begin), end - begin, MADV_POPULATE_WRITE);
  if (failed != 0 && errno == EINVAL) touch(begin, end, page_size);
}

}  // namespace fusedcomm

// Pages of fresh memory: a fault per 4 KiB costs more than the copy that fills them. So they are large.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace fusedcomm {

// Asks for huge pages inside [address, address + num_bytes); without effect where the system has none.
inline void prefer_huge_pages(uintptr_t address, uintptr_t num_bytes) {
  constexpr uintptr_t kHugePage = 2u << 20;
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + num_bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace fusedcomm

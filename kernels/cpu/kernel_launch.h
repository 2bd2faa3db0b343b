// A Triton kernel's launch, packed once; addresses are filled in by each run.
#pragma once

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "driver.h"

namespace fusedcomm {

class KernelLaunch {
 public:
  // Where in the parameters the address of a step's place stands.
  struct Address {
    int64_t at;
    size_t place;
  };
  // Where the tensor map of a step's place stands.
  struct Described {
    int64_t at;
    size_t place;
    Driver::Encoding encoding;
    uintptr_t last = 0;  // the address that it was made for: mostly the allocator gives the same again
  };

  // `parameters`: the bytes of all of them; `offsets`: where each begins.
  KernelLaunch(uintptr_t function, uint32_t num_blocks, uint32_t num_threads, uint32_t shared_bytes,
               std::vector<LaunchAttribute> attributes, const std::string& parameters, const std::vector<int64_t>& offsets,
               std::vector<Address> addresses, std::vector<Described> described)
      : function_(reinterpret_cast<void*>(function)), attributes_(std::move(attributes)),
        block_(parameters.size() / sizeof(TensorMap) + 1), addresses_(std::move(addresses)),
        described_(std::move(described)) {
    config_ = {{num_blocks, 1, 1}, {num_threads, 1, 1}, shared_bytes, nullptr, attributes_.data(),
               static_cast<uint32_t>(attributes_.size())};
    std::memcpy(block_.data(), parameters.data(), parameters.size());
    for (const int64_t offset : offsets) parameters_.push_back(at(offset));
  }
  KernelLaunch(const KernelLaunch&) = delete;  // it points into itself
  KernelLaunch& operator=(const KernelLaunch&) = delete;

  template <typename AddressOf>
  void operator()(void* stream, const AddressOf& address_of) {
    for (const Address& each : addresses_) {
      const uintptr_t address = address_of(each.place);
      std::memcpy(at(each.at), &address, sizeof(address));
    }
    for (Described& each : described_) {
      const uintptr_t address = address_of(each.place);
      if (address == each.last) continue;
      Driver::get().encode(reinterpret_cast<TensorMap*>(at(each.at)), each.encoding, address);
      each.last = address;
    }
    config_.stream = stream;
    Driver::get().launch(config_, function_, parameters_.data());
  }

 private:
  char* at(int64_t offset) { return reinterpret_cast<char*>(block_.data()) + offset; }

  void* function_;
  std::vector<LaunchAttribute> attributes_;
  LaunchConfig config_{};
  std::vector<TensorMap> block_;  // the parameters, aligned as tensor maps must be
  std::vector<void*> parameters_;
  std::vector<Address> addresses_;
  std::vector<Described> described_;
};

}  // namespace fusedcomm

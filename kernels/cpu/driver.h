// The CUDA driver, opened at run time: no header or library of CUDA is needed to build this. Types and constants are
// those of cuda.h.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusedcomm {

struct alignas(128) TensorMap {
  uint64_t words[16];
};

struct LaunchAttribute {
  int id;
  int padding;
  uint32_t value[16];
};

struct LaunchConfig {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  LaunchAttribute* attributes;
  uint32_t num_attributes;
};

class Driver {
 public:
  static const Driver& get() {
    static const Driver driver;
    return driver;
  }

  void launch(const LaunchConfig& config, void* function, void** parameters) const {
    check(launch_(&config, function, parameters, nullptr), "cuLaunchKernelEx");
  }
  void write(void* stream, uintptr_t address, uint64_t value) const {
    check(write_(stream, address, value, 0), "cuStreamWriteValue64");
  }
  void copy(uintptr_t to, uintptr_t from, size_t num_bytes, void* stream) const {
    check(copy_(to, from, num_bytes, stream), "cuMemcpyAsync");
  }
  void* make_event() const {
    constexpr unsigned kWithoutTime = 2;
    void* event = nullptr;
    check(make_event_(&event, kWithoutTime), "cuEventCreate");
    return event;
  }
  void destroy(void* event) const { destroy_event_(event); }  // which fails where the process ends
  void record(void* event, void* stream) const { check(record_(event, stream), "cuEventRecord"); }
  void await(void* event, void* stream) const { check(await_(stream, event, 0), "cuStreamWaitEvent"); }

  bool is_capturing(void* stream) const {
    int status = 0;
    check(is_capturing_(stream, &status), "cuStreamIsCapturing");
    return status != 0;
  }

  struct Encoding {
    int dtype, swizzle, fill;
    bool is_small;  // of a tensor for which a driver up to 13.1 sets a bit that must not be there, as CUTLASS found
    std::vector<uint64_t> sizes, strides;  // the innermost dim first; its stride, 1, is left out
    std::vector<uint32_t> box;
  };
  void encode(TensorMap* map, const Encoding& encoding, uintptr_t address) const {
    static const uint32_t ones[5] = {1, 1, 1, 1, 1};
    constexpr int kNoInterleave = 0, kPromote128Bytes = 2;
    check(encode_(map, encoding.dtype, static_cast<uint32_t>(encoding.sizes.size()), address, encoding.sizes.data(),
                  encoding.strides.data(), encoding.box.data(), ones, kNoInterleave, encoding.swizzle, kPromote128Bytes,
                  encoding.fill),
          "cuTensorMapEncodeTiled");
    if (encoding.is_small) map->words[1] &= ~(uint64_t{1} << 21);
  }

  // A thread that torch has made no call of CUDA's runtime from has no context yet.
  void ensure_context(int device) const {
    void* context = nullptr;
    check(current_(&context), "cuCtxGetCurrent");
    if (context != nullptr) return;
    check(retain_(&context, device), "cuDevicePrimaryCtxRetain");
    check(set_current_(context), "cuCtxSetCurrent");
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    TORCH_CHECK(library != nullptr, "the CUDA driver, libcuda.so.1, must be there: ", dlerror());
    find(library, launch_, "cuLaunchKernelEx");
    find(library, write_, "cuStreamWriteValue64_v2");
    find(library, copy_, "cuMemcpyAsync");
    find(library, make_event_, "cuEventCreate");
    find(library, destroy_event_, "cuEventDestroy_v2");
    find(library, record_, "cuEventRecord");
    find(library, await_, "cuStreamWaitEvent");
    find(library, is_capturing_, "cuStreamIsCapturing");
    find(library, encode_, "cuTensorMapEncodeTiled");
    find(library, current_, "cuCtxGetCurrent");
    find(library, set_current_, "cuCtxSetCurrent");
    find(library, retain_, "cuDevicePrimaryCtxRetain");
  }

  template <typename Function>
  static void find(void* library, Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    TORCH_CHECK(function != nullptr, "the CUDA driver must have ", name);
  }

  static void check(int error, const char* name) {
    TORCH_CHECK(error == 0, "the CUDA driver: ", name, " gave error ", error);
  }

  int (*launch_)(const LaunchConfig*, void* function, void** parameters, void** extra);
  int (*write_)(void* stream, uint64_t address, uint64_t value, unsigned flags);
  int (*copy_)(uint64_t to, uint64_t from, size_t num_bytes, void* stream);
  int (*make_event_)(void** event, unsigned flags);
  int (*destroy_event_)(void* event);
  int (*record_)(void* event, void* stream);
  int (*await_)(void* stream, void* event, unsigned flags);
  int (*is_capturing_)(void* stream, int* status);
  int (*encode_)(TensorMap*, int dtype, uint32_t rank, uint64_t address, const uint64_t* sizes, const uint64_t* strides,
                 const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill);
  int (*current_)(void** context);
  int (*set_current_)(void* context);
  int (*retain_)(void** context, int device);
};

}  // namespace fusedcomm

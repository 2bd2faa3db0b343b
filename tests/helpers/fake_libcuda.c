/* libcuda.so.1 on a machine without a GPU, for Triton's own launchers.
 *
 * It answers what they ask of the device and its functions from tables that tests/helpers/fake_driver.py fills. What
 * they would have the device do goes to that file's hooks, which say whether a device would take it. Without a hook all
 * is taken, so that a launch costs the host what Triton's part of it costs. */

#include <cuda.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

/* A CUfunction points to one of these. */
typedef struct {
  int registers, local_bytes, static_shared, max_threads, max_dynamic_shared;
} Function;

EXPORT int fake_attributes[256];  /* by CUdevice_attribute */
EXPORT char fake_refusal[1024];   /* why the last call failed */
EXPORT CUresult (*fake_load)(const void *image, const char *name, Function **function);
EXPORT CUresult (*fake_tensor_map)(CUtensorMap *map, int type, unsigned rank, void *address, const cuuint64_t *dims,
                                   const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
                                   int interleave, int swizzle);
EXPORT CUresult (*fake_launch)(Function *function, const CUlaunchConfig *config, void **arguments);
EXPORT CUresult (*fake_write)(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags);

static int context; /* its address is a CUcontext */

static CUresult refuse(const char *why) {
  strncpy(fake_refusal, why, sizeof fake_refusal - 1);
  return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = fake_refusal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
  *count = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  if ((unsigned)attribute >= sizeof fake_attributes / sizeof *fake_attributes || fake_attributes[attribute] < 0)
    return refuse("device attribute: the fake device does not have it");
  *value = fake_attributes[attribute];
  return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *retained, CUdevice device) {
  *retained = (CUcontext)&context;
  return CUDA_SUCCESS;
}

static __thread CUcontext of_thread;  // a thread has none before its first call of the runtime, or sets one

CUresult cuCtxGetCurrent(CUcontext *current) {
  *current = of_thread;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext current) {
  of_thread = current;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return CUDA_SUCCESS;
}

CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  return of_thread == NULL ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}

/* On a GPU this turns registered host memory into the device's address of it; device memory stays what it is. */
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)value = pointer;
  return CUDA_SUCCESS;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  return fake_load(module, name, (Function **)function);
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  Function *known = (Function *)function;
  switch (attribute) {
  case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = known->registers; return CUDA_SUCCESS;
  case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = known->local_bytes; return CUDA_SUCCESS;
  case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = known->static_shared; return CUDA_SUCCESS;
  case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = known->max_threads; return CUDA_SUCCESS;
  default: return refuse("function attribute: the fake device does not have it");
  }
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  Function *known = (Function *)function;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
    return refuse("function attribute: this driver cannot set it");
  if (value < 0 || value + known->static_shared > fake_attributes[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN])
    return refuse("dynamic shared memory: more than a block may opt in to");
  known->max_dynamic_shared = value;
  return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config) {
  return refuse("clusters: nothing here launches any");
}

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *dims, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  if (!fake_tensor_map)
    return CUDA_SUCCESS;
  return fake_tensor_map(map, type, rank, address, dims, strides, box, element_strides, interleave, swizzle);
}

CUresult cuTensorMapEncodeIm2col(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                 const cuuint64_t *dims, const cuuint64_t *strides, const int *lower, const int *upper,
                                 cuuint32_t channels, cuuint32_t pixels, const cuuint32_t *element_strides,
                                 CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                 CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  return refuse("im2col: nothing here asks for it");
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return fake_launch ? fake_launch((Function *)function, config, arguments) : CUDA_SUCCESS;
}

CUresult cuStreamWriteValue64_v2(CUstream stream, CUdeviceptr address, cuuint64_t value, unsigned flags) {
  return fake_write ? fake_write(stream, address, value, flags) : CUDA_SUCCESS;
}

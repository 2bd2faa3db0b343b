/* The CUDA runtime and cuBLAS of a machine that has no GPU, for a stock CUDA build of torch.
 *
 * make host-cost links it with tests/helpers/fake_libcuda.c, the driver, into a libcuda.so.1 that is preloaded. torch's
 * own code (guards, streams, events, the caching allocator, the dispatcher) runs down to here. There are two devices, whose
 * memory is the host's; kernels and matmuls compute nothing, and cost the host what a call of an empty function costs.
 * A function that is missing here ends the process with its name, as the loader binds lazily. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <driver_types.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <valgrind/callgrind.h>

typedef uint64_t u64;
enum { NEITHER, READS, WRITES }; /* of traces.py:Access */

/* Hears of all that streams are given, in the host's order. A copy or a matmul is told once for each operand. */
void (*pretended_note)(const char *what, int device, u64 stream, int access, u64 address, u64 bytes);
int pretended_late; /* whether the device has done nothing yet whenever it is asked */

static __thread int current; /* device */
static u64 made = 1;

static void note(const char *what, void *stream, int access, const void *address, u64 bytes) {
  if (pretended_note)
    pretended_note(what, current, (u64)stream, access, (u64)address, bytes);
}

/* A stream's or an event's device is in the upper half of its handle. */
static void *new_handle(void) { return (void *)((u64)(current + 1) << 32 | made++); }

static void copied(void *to, const void *from, u64 bytes, void *stream) {
  note("copy", stream, READS, from, bytes);
  note("copy", stream, WRITES, to, bytes);
}

static u64 spanned(u64 rows, u64 columns, u64 step, u64 batches, u64 apart, int type) {
  u64 itemsize = type == 0 ? 4 : type == 1 ? 8 : 2; /* cudaDataType: CUDA_R_32F, CUDA_R_64F; else 16 bits */
  return (batches ? (batches - 1) * apart + (columns - 1) * step + rows : 0) * itemsize;
}

/* Counts instructions of what comes between, of all threads, under callgrind. */
void count_begin(void) {
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
}

void count_end(const char *name) {
  CALLGRIND_DUMP_STATS_AT(name);
  CALLGRIND_STOP_INSTRUMENTATION;
}

#define F(name, arguments, ...) int name arguments { __VA_ARGS__; return 0; }
#define OK(name) int name() { return 0; }

F(cudaGetDeviceCount, (int *count), *count = 2)
F(cudaGetDevice, (int *device), *device = current)
F(cudaSetDevice, (int device), current = device)
F(cudaDriverGetVersion, (int *version), *version = 13000)
F(cudaRuntimeGetVersion, (int *version), *version = 13000)
F(cudaDeviceGetStreamPriorityRange, (int *least, int *most), *least = 0, *most = -5)
F(cudaDeviceCanAccessPeer, (int *can, int device, int peer), *can = 0)
F(cudaDeviceGetAttribute, (int *value, int attribute, int device), *value = 0)
F(cudaMemGetInfo, (size_t *left, size_t *all), *left = *all = 80ull << 30)
F(cuDevicePrimaryCtxGetState, (int device, unsigned *flags, int *active), *flags = 0, *active = 1)
F(cudaGetDeviceProperties, (struct cudaDeviceProp *p, int device),
  memset(p, 0, sizeof *p); strcpy(p->name, "a pretended GPU"); p->major = 9; p->multiProcessorCount = 132;
  p->warpSize = 32; p->totalGlobalMem = 80ull << 30; p->maxThreadsPerBlock = 1024; p->sharedMemPerBlock = 48 << 10;
  p->maxThreadsPerMultiProcessor = 2048; p->regsPerMultiprocessor = 64 << 10; p->sharedMemPerBlockOptin = 227 << 10)
const char *cudaGetErrorString(int error) { return "an error of the pretended CUDA runtime"; }
const char *cudaGetErrorName(int error) { return "pretended"; }
OK(cudaGetLastError) OK(cudaPeekAtLastError) OK(cudaThreadExchangeStreamCaptureMode)

F(cudaMalloc, (void **p, size_t size),
  *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))
F(cudaHostAlloc, (void **p, size_t size, unsigned flags), return posix_memalign(p, 4096, size))
F(cudaFreeHost, (void *p), free(p))
F(cudaPointerGetAttributes, (struct cudaPointerAttributes *a, const void *p), memset(a, 0, sizeof *a); a->type = 2)
F(cudaMemset, (void *to, int byte, size_t size), memset(to, byte, size))
F(cudaMemcpy, (void *to, const void *from, size_t size, int kind), memcpy(to, from, size))
F(cudaMemsetAsync, (void *to, int byte, size_t size, void *stream), note("memset", stream, WRITES, to, size);
  if (byte) memset(to, byte, size)) /* memory that nobody has written is zero, and takes no room */
F(cudaMemcpyAsync, (void *to, const void *from, size_t size, int kind, void *stream), copied(to, from, size, stream);
  if (kind != cudaMemcpyDeviceToDevice) memcpy(to, from, size))
F(cuMemcpyAsync, (void *to, void *from, size_t size, void *stream), copied(to, from, size, stream))
OK(cudaFree) OK(cudaHostRegister) OK(cudaHostUnregister)

F(cudaStreamCreateWithPriority, (void **stream, unsigned flags, int priority), *stream = new_handle())
F(cudaEventCreate, (void **event), *event = new_handle())
F(cudaEventCreateWithFlags, (void **event, int flags), *event = new_handle())
F(cudaEventRecord, (void *event, void *stream), note("record", stream, NEITHER, event, 0))
F(cudaEventRecordWithFlags, (void *event, void *stream, unsigned flags), note("record", stream, NEITHER, event, 0))
F(cudaStreamWaitEvent, (void *stream, void *event, unsigned flags), note("wait", stream, NEITHER, event, 0))
F(cuEventCreate, (void **event, unsigned flags), *event = new_handle())
F(cuEventRecord, (void *event, void *stream), note("record", stream, NEITHER, event, 0))
F(cuStreamWaitEvent, (void *stream, void *event, unsigned flags), note("wait", stream, NEITHER, event, 0))
F(cudaEventSynchronize, (void *event), note("host waits", 0, NEITHER, event, 0))
F(cudaStreamSynchronize, (void *stream), note("synchronize", stream, NEITHER, 0, 0))
F(cudaEventQuery, (void *event), return pretended_late ? cudaErrorNotReady : 0)
F(cudaStreamQuery, (void *stream), return pretended_late ? cudaErrorNotReady : 0)
F(cudaStreamIsCapturing, (void *stream, int *status), *status = 0)
F(cudaStreamGetCaptureInfo, (void *stream, int *status, u64 *id, void *g, void *d, void *e, size_t *n), *status = 0)
OK(cudaStreamDestroy) OK(cudaEventDestroy) OK(cuEventDestroy_v2) OK(cudaDeviceSynchronize)

static __thread void *pushed; /* stream of the launch that follows */
F(__cudaPushCallConfiguration, (u64 g0, u64 g1, u64 b0, u64 b1, size_t shared, void *stream), pushed = stream)
F(__cudaPopCallConfiguration, (void *grid, void *block, void *shared, void **stream), *stream = pushed)
F(__cudaGetKernel, (void **kernel, void *entry), *kernel = entry)
F(__cudaLaunchKernel, (void *k, u64 g0, unsigned g1, u64 b0, unsigned b1, void **args, size_t shared, void *stream),
  note("kernel", stream, NEITHER, k, 0))
F(cudaFuncGetAttributes, (void *attributes, const void *f), memset(attributes, 0, sizeof(struct cudaFuncAttributes)))
F(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *blocks), *blocks = 1)
F(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int *blocks), *blocks = 1)
F(cudaGetDriverEntryPointByVersion, (const char *name, void **f, unsigned version, u64 flags, int *status),
  *f = dlsym(RTLD_DEFAULT, name), *status = *f == 0)
void **__cudaRegisterFatBinary(void *binary) { static void *registered; return &registered; }
OK(__cudaRegisterFatBinaryEnd) OK(__cudaUnregisterFatBinary) OK(__cudaRegisterFunction) OK(__cudaRegisterVar)
OK(cudaFuncSetAttribute) OK(cudaProfilerStart) OK(cudaProfilerStop) OK(nvshmem_init) /* taken the address of */

/* cuBLAS: matrices are stored by columns. A handle is used by one thread and one stream at a time. */
static __thread void *matmuls;

static void multiplied(void *stream, int ta, int tb, u64 m, u64 n, u64 k, void *a, int at, u64 lda, u64 sa, void *b,
                       int bt, u64 ldb, u64 sb, void *c, int ct, u64 ldc, u64 sc, u64 batches) {
  note("matmul", stream, READS, a, ta ? spanned(k, m, lda, batches, sa, at) : spanned(m, k, lda, batches, sa, at));
  note("matmul", stream, READS, b, tb ? spanned(n, k, ldb, batches, sb, bt) : spanned(k, n, ldb, batches, sb, bt));
  note("matmul", stream, WRITES, c, spanned(m, n, ldc, batches, sc, ct));
}

F(cublasCreate_v2, (void **h), *h = malloc(1))
F(cublasSetStream_v2, (void *h, void *stream), matmuls = stream)
F(cublasGemmEx, (void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a, int at, int lda, void *b, int bt,
  int ldb, void *beta, void *c, int ct, int ldc),
  multiplied(matmuls, ta, tb, m, n, k, a, at, lda, 0, b, bt, ldb, 0, c, ct, ldc, 0, 1))
F(cublasGemmStridedBatchedEx, (void *h, int ta, int tb, int m, int n, int k, void *alpha, void *a, int at, int lda,
  u64 sa, void *b, int bt, int ldb, u64 sb, void *beta, void *c, int ct, int ldc, u64 sc, int batches),
  multiplied(matmuls, ta, tb, m, n, k, a, at, lda, sa, b, bt, ldb, sb, c, ct, ldc, sc, batches))
OK(cublasDestroy_v2) OK(cublasSetWorkspace_v2) OK(cublasSetMathMode) OK(cublasGetMathMode) OK(cublasSetPointerMode_v2)
OK(cublasGetPointerMode_v2)

typedef struct { u64 type, rows, columns, step; } Layout;
F(cublasLtMatrixLayoutCreate, (Layout **l, int type, u64 rows, u64 columns, int64_t step),
  *l = malloc(sizeof **l); **l = (Layout){type, rows, columns, step})
F(cublasLtMatrixLayoutDestroy, (Layout *l), free(l))
F(cublasLtMatmulAlgoGetHeuristic, (void *h, void *d, void *a, void *b, void *c, void *e, void *p, int n, void *results,
  int *found), memset(results, 0, 64); *found = 1)
static u64 laid(const Layout *l) { return spanned(l->rows, l->columns, l->step, 1, 0, l->type); }
F(cublasLtMatmul, (void *h, void *desc, void *alpha, void *a, Layout *al, void *b, Layout *bl, void *beta, void *c,
  Layout *cl, void *d, Layout *dl, void *algorithm, void *workspace, size_t size, void *stream),
  note("matmul", stream, READS, a, laid(al)); note("matmul", stream, READS, b, laid(bl));
  note("matmul", stream, WRITES, d, laid(dl)))
OK(cublasLtMatmulDescCreate) OK(cublasLtMatmulDescDestroy) OK(cublasLtMatmulDescSetAttribute)
OK(cublasLtMatmulPreferenceCreate) OK(cublasLtMatmulPreferenceDestroy) OK(cublasLtMatmulPreferenceSetAttribute)
OK(cublasLtMatrixLayoutSetAttribute)

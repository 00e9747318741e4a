/* The devices: eight A100s with 80 GiB, on paper. */
#include "driver_types.h"
#include "nullgpu.h"

static _Thread_local int device;

int current_device(void) { return device; }

int cudaGetDeviceCount(int *n) { return *n = DEVICES, 0; }
int cudaGetDevice(int *d) { return *d = device, 0; }
int cudaSetDevice(int d) {
    if (d < 0 || d >= DEVICES) return cudaErrorInvalidDevice;
    device = d;
    return 0;
}
int cudaDriverGetVersion(int *v) { return *v = 13000, 0; }
int cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    (void)d;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "NVIDIA A100-SXM4-80GB (null)");
    p->major = 8;
    p->totalGlobalMem = DEVICE_BYTES;
    p->multiProcessorCount = 108;
    p->warpSize = 32;
    p->maxThreadsPerBlock = 1024;
    p->maxThreadsPerMultiProcessor = 2048;
    p->sharedMemPerBlock = 49152;
    p->sharedMemPerBlockOptin = 166912;
    p->sharedMemPerMultiprocessor = 167936;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->l2CacheSize = 40 << 20;
    p->textureAlignment = 512;
    p->maxBlocksPerMultiProcessor = 32;
    p->memoryBusWidth = 5120;
    p->unifiedAddressing = p->concurrentKernels = 1;
    p->asyncEngineCount = 3;
    return 0;
}

int cudaDeviceGetAttribute(int *v, int attribute, int d) {
    (void)d;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *v = 8; break;
    case cudaDevAttrComputeCapabilityMinor: *v = 0; break;
    case cudaDevAttrMultiProcessorCount: *v = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *v = 1024; break;
    case cudaDevAttrWarpSize: *v = 32; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *v = 2048; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *v = 166912; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *v = 167936; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *v = 49152; break;
    case cudaDevAttrMaxGridDimX: *v = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *v = 65535; break;
    case cudaDevAttrL2CacheSize: *v = 40 << 20; break;
    default: *v = 1;
    }
    return 0;
}

int cudaDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:%02x:00.0", d + 1), 0; }
int cudaDeviceCanAccessPeer(int *yes, int a, int b) { return *yes = a != b, 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }

const char *cudaGetErrorName(int e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char *cudaGetErrorString(int e) {
    if (e == cudaErrorLaunchFailure && failure()) return failure();
    return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorNotReady ? "device not ready" : "null error";
}
int cudaGetLastError(void) { return failure() ? cudaErrorLaunchFailure : 0; }
int cudaPeekAtLastError(void) { return cudaGetLastError(); }

/* The driver's functions, which torch asks the runtime for. Nothing of what they would do is rehearsed. */
static int driver_function(void) { return 0; }
static int primary_context(int d, unsigned *flags, int *active) {
    (void)d;
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    *f = !strcmp(name, "cuDevicePrimaryCtxGetState") ? (void *)primary_context : (void *)driver_function;
    if (status) *status = 0;
    return 0;
}

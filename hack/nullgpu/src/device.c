/* The devices: eight A100s with 80 GiB, on paper, or what NULLGPU_CAPABILITY says. A process sees those that
 * CUDA_VISIBLE_DEVICES numbers, from 0 on. */
#include "driver_types.h"
#include "nullgpu.h"

static _Thread_local int device;
static int seen[DEVICES], seen_count;
static pthread_once_t read_once = PTHREAD_ONCE_INIT;

static void read_visible(void) { seen_count = visible_devices(seen); }
static int visible(void) { return pthread_once(&read_once, read_visible), seen_count; }

int current_device(void) { return device; }
int machine_device(int d) { return d < visible() ? seen[d] : -1; }

int cudaGetDeviceCount(int *n) { return *n = visible(), visible() ? 0 : cudaErrorNoDevice; }
int cudaGetDevice(int *d) { return *d = device, 0; }
int cudaSetDevice(int d) {
    if (d < 0 || d >= visible()) return cudaErrorInvalidDevice;
    device = d;
    return 0;
}
int cudaDriverGetVersion(int *v) { return *v = claimed_cuda(), 0; }
int cudaRuntimeGetVersion(int *v) { return *v = 13000, 0; }

int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
    memset(p, 0, sizeof *p);
    p->uuid.bytes[15] = p->pciBusID = machine_device(d) + 1;
    claimed_name(p->name, sizeof p->name);
    p->major = claimed_capability() / 10;
    p->minor = claimed_capability() % 10;
    p->totalGlobalMem = device_bytes();
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
    case cudaDevAttrComputeCapabilityMajor: *v = claimed_capability() / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *v = claimed_capability() % 10; break;
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

int cudaDeviceGetPCIBusId(char *s, int n, int d) { return snprintf(s, n, "0000:%02x:00.0", machine_device(d) + 1), 0; }
int cudaDeviceCanAccessPeer(int *yes, int a, int b) { return *yes = a != b, 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }

const char *cudaGetErrorName(int e) { return e == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError"; }
const char *cudaGetErrorString(int e) {
    if (e == cudaErrorLaunchFailure && failure()) return failure();
    return e == cudaErrorMemoryAllocation ? "out of memory" : e == cudaErrorNotReady ? "device not ready" : "null error";
}
int cudaGetLastError(void) { return failure() ? cudaErrorLaunchFailure : 0; }
int cudaPeekAtLastError(void) { return cudaGetLastError(); }

/* The driver's functions, which torch asks the runtime for. Of those that are not listed nothing is rehearsed. */
static int driver_function(void) { return 0; }
static int primary_context(int d, unsigned *flags, int *active) {
    (void)d;
    if (flags) *flags = 0;
    if (active) *active = 1;
    return 0;
}
int cudaGetDriverEntryPointByVersion(const char *name, void **f, unsigned version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    static const struct {
        const char *name;
        void *function;
    } known[] = {{"cuDevicePrimaryCtxGetState", primary_context},
                 {"cuMemAddressReserve", null_memory_reserve},
                 {"cuMemCreate", null_memory_create},
                 {"cuMemRelease", null_memory_release}};
    *f = (void *)driver_function;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i].name, name)) *f = known[i].function;
    if (status) *status = 0;
    return 0;
}

/* libcuda.so.1, which torch wants to find, and with which Triton loads and launches what it has compiled. */
#include "nullgpu.h"
#include <dlfcn.h>

static int seen[DEVICES];

int cuInit(unsigned flags) { return (void)flags, visible_devices(seen) ? 0 : 100; /* CUDA_ERROR_NO_DEVICE */ }
int cuDriverGetVersion(int *v) { return *v = claimed_cuda(), 0; }
int cuGetErrorString(int e, const char **text) { return (void)e, *text = "null driver", 0; }
int cuGetErrorName(int e, const char **text) { return (void)e, *text = "CUDA_ERROR", 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuDeviceGet(int *d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetCount(int *n) { return *n = visible_devices(seen), 0; }
int cuDeviceGetName(char *name, int size, int d) { return (void)d, claimed_name(name, size), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int d) { return (void)d, *bytes = DEVICE_BYTES, 0; }
int cuDeviceGetAttribute(int *v, int attribute, int d) {
    (void)d;
    switch (attribute) {
    case 10: *v = 32; break;      /* threads of a warp */
    case 12: *v = 65536; break;   /* registers of a block */
    case 13: *v = 1410000; break; /* kHz */
    case 16: *v = 108; break;     /* multiprocessors */
    case 36: *v = 1593000; break; /* kHz of the memory */
    case 37: *v = 5120; break;    /* bits of its bus */
    case 75: *v = claimed_capability() / 10; break; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
    case 76: *v = claimed_capability() % 10; break;
    case 81: *v = 167936; break; /* bytes of shared memory of a multiprocessor */
    case 97: *v = 166912; break; /* and of a block that asks for it */
    default: *v = 1;
    }
    return 0;
}

/* ---- Triton's kernels: they are compiled, loaded and counted, and do nothing */
extern void nullgpu_launched(void) __attribute__((weak)); /* of libnullgpu.so, where that is loaded */

static int launched(void) {
    if (nullgpu_launched) nullgpu_launched();
    return 0;
}
int cuLaunchKernel(void) { return launched(); }
int cuLaunchKernelEx(void) { return launched(); }
int cuModuleLoad(void **module, const char *path) { return (void)path, *module = (void *)16, 0; }
int cuModuleLoadData(void **module, const void *image) { return (void)image, *module = (void *)16, 0; }
int cuModuleLoadDataEx(void **module, const void *image) { return (void)image, *module = (void *)16, 0; }
int cuModuleUnload(void *module) { return (void)module, 0; }
int cuModuleGetFunction(void **f, void *module, const char *name) { return (void)module, (void)name, *f = (void *)32, 0; }
int cuDevicePrimaryCtxRetain(void **context, int d) { return (void)d, *context = (void *)1, 0; }
int cuCtxSetCurrent(void *context) { return (void)context, 0; }
int cuCtxGetLimit(size_t *value, int limit) { return (void)limit, *value = 0, 0; }
int cuCtxSetLimit(int limit, size_t value) { return (void)limit, (void)value, 0; }
int cuFuncSetCacheConfig(void *f, int config) { return (void)f, (void)config, 0; }
int cuFuncSetAttribute(void *f, int attribute, int value) { return (void)f, (void)attribute, (void)value, 0; }
int cuFuncGetAttribute(int *value, int attribute, void *f) {
    (void)f;
    return *value = attribute == 0 ? 1024 : attribute == 4 ? 32 : 0, 0; /* threads of a block, registers; no spills */
}
int cuPointerGetAttribute(void *value, int attribute, unsigned long long p) {
    return (void)attribute, *(unsigned long long *)value = p, 0; /* the address on the device */
}
int cuPointerGetAttributes(unsigned n, const int *attributes, void **values, unsigned long long p) {
    for (unsigned i = 0; i < n; i++) cuPointerGetAttribute(values[i], attributes[i], p);
    return 0;
}
int cuOccupancyMaxActiveClusters(int *n) { return *n = 1, 0; }
int cuTensorMapEncodeTiled(void) { return 0; }
int cuTensorMapEncodeIm2col(void) { return 0; }

/* vLLM's kernels ask for the functions of the driver by name. */
int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    char later[128];
    (void)version, (void)flags;
    snprintf(later, sizeof later, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, later);
    if (status) *status = *function ? 0 : 1; /* CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND */
    return *function ? 0 : 500;
}

/* libcuda.so.1, which torch wants to find. Its runtime does the work; Triton's launches are not rehearsed. */
#include "nullgpu.h"

int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *v) { return *v = claimed_cuda(), 0; }
int cuGetErrorString(int e, const char **text) { return (void)e, *text = "null driver", 0; }
int cuGetErrorName(int e, const char **text) { return (void)e, *text = "CUDA_ERROR", 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuDeviceGet(int *d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetCount(int *n) { return *n = DEVICES, 0; }
int cuDeviceGetName(char *name, int size, int d) { return (void)d, claimed_name(name, size), 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int d) { return (void)d, *bytes = DEVICE_BYTES, 0; }
int cuDeviceGetAttribute(int *v, int attribute, int d) {
    (void)d;
    switch (attribute) {
    case 75: *v = claimed_capability() / 10; break; /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
    case 76: *v = claimed_capability() % 10; break;
    default: *v = 1;
    }
    return 0;
}

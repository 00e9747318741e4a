/* libnvidia-ml.so.1: what torch asks the management library before it makes expandable segments, and
   vLLM to know its GPU. */
#include "nullgpu.h"
#include <stdlib.h>

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return (void)flags, 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = 8, 0; }
/* The bus is the device's number plus one: device.c. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return *device = (void *)strtoul(bus + 5, NULL, 16), 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, int *type) { return (void)d, (void)link, *type = 0, 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, void *info) { return (void)d, (void)link, (void)info, 3; }
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *found) { return (void)d, (void)found, *n = 0, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { return *v = 13000, 0; }

/* A device's handle is its number plus one, as above. */
int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **device) { return *device = (void *)(size_t)(i + 1), 0; }
int nvmlDeviceGetIndex(void *d, unsigned *i) { return *i = (unsigned)(size_t)d - 1, 0; }
int nvmlDeviceGetName(void *d, char *name, unsigned size) { return (void)d, claimed_name(name, (int)size), 0; }
int nvmlDeviceGetUUID(void *d, char *id, unsigned size) { return snprintf(id, size, "GPU-%zu", (size_t)d - 1), 0; }
int nvmlDeviceGetNumaNodeId(void *d, unsigned *node) { return (void)d, *node = 0, 0; }
int nvmlDeviceGetCudaComputeCapability(void *d, int *major, int *minor) {
    return (void)d, *major = claimed_capability() / 10, *minor = claimed_capability() % 10, 0;
}
int nvmlDeviceGetMemoryInfo(void *d, unsigned long long bytes[3]) { /* total, free, used */
    return (void)d, bytes[0] = DEVICE_BYTES, bytes[1] = DEVICE_BYTES, bytes[2] = 0, 0;
}

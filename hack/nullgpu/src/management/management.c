/* libnvidia-ml.so.1: what torch asks the management library before it makes expandable segments. */
#include <stdlib.h>

int nvmlInit(void) { return 0; }
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { return *n = 8, 0; }
/* The bus is the device's number plus one: device.c. */
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { return *device = (void *)strtoul(bus + 5, NULL, 16), 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *d, unsigned link, int *type) { return (void)d, (void)link, *type = 0, 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *d, unsigned link, void *info) { return (void)d, (void)link, (void)info, 3; }
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, void *found) { return (void)d, (void)found, *n = 0, 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *v) { return *v = 13000, 0; }

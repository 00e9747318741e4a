/* libcuda.so.1, which torch wants to find. Its runtime does the work; Triton's launches are not rehearsed. */
int cuInit(unsigned flags) { return (void)flags, 0; }
int cuDriverGetVersion(int *v) { return *v = 13000, 0; }
int cuGetErrorString(int e, const char **text) { return (void)e, *text = "null driver", 0; }
int cuGetErrorName(int e, const char **text) { return (void)e, *text = "CUDA_ERROR", 0; }
int cuCtxGetCurrent(void **context) { return *context = (void *)1, 0; }
int cuDeviceGet(int *d, int ordinal) { return *d = ordinal, 0; }
int cuDeviceGetCount(int *n) { return *n = 8, 0; }

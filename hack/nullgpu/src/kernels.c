/* Kernels and cuBLAS: a launch is counted and does nothing. What build.py finds missing becomes such a stub too. */
#include "driver_types.h"
#include "nullgpu.h"

int __cudaLaunchKernel(void) { return count(&c_launches, 1), 0; }
int cudaLaunchKernel(void) { return count(&c_launches, 1), 0; }
int cudaLaunchKernelExC(void) { return count(&c_launches, 1), 0; }
void nullgpu_launched(void) { count(&c_launches, 1); } /* by the driver */
int cudaMemsetAsync(void) { return count(&c_launches, 1), 0; }
int cudaMemset(void) { return count(&c_launches, 1), 0; }
int cublasLtMatmul(void) { return count(&c_launches, 1), 0; }
int cublasGemmEx(void) { return count(&c_launches, 1), 0; }
int cublasGemmStridedBatchedEx(void) { return count(&c_launches, 1), 0; }
int cublasSgemm_v2(void) { return count(&c_launches, 1), 0; }
int cublasSgemmStridedBatched(void) { return count(&c_launches, 1), 0; }

void **__cudaRegisterFatBinary(void *f) {
    static void *handle[4];
    return (void)f, handle;
}
int cudaFuncGetAttributes(struct cudaFuncAttributes *a, const void *f) {
    (void)f;
    memset(a, 0, sizeof *a);
    a->maxThreadsPerBlock = 1024;
    a->ptxVersion = a->binaryVersion = 80;
    a->numRegs = 32;
    return 0;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, const void *f, int block, size_t shared, unsigned flags) {
    (void)f, (void)block, (void)shared, (void)flags;
    return *n = 2, 0;
}

static void *handle(void) {
    static atomic_long last = 0x1000;
    return (void *)atomic_fetch_add(&last, 16);
}
int cublasCreate_v2(void **h) { return *h = handle(), 0; }
int cublasLtCreate(void **h) { return *h = handle(), 0; }
int cublasGetVersion_v2(void *h, int *v) { return (void)h, *v = 130101, 0; }
int cublasGetMathMode(void *h, int *mode) { return (void)h, *mode = 0, 0; }
const char *cublasGetStatusString(int s) { return (void)s, "null"; }
int cublasLtMatmulAlgoGetHeuristic(void *h, void *op, void *a, void *b, void *c, void *d, void *preference, int most,
                                   void *results, int *found) {
    (void)h, (void)op, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)most, (void)results;
    return *found = 1, 0;
}

/* Memory: addresses without pages, accounted per device. A host that touches one gets SIGSEGV, as on a real GPU.
 * Copies to the host bring zeros. */
#include <sys/mman.h>
#include "driver_types.h"
#include "nullgpu.h"

#define SPAN (1ULL << 40) /* addresses of one device; none is used twice */
#define RESERVED (1ULL << 30) /* what a CUDA context and the driver take */

typedef struct block {
    char *at;
    size_t size;
    struct block *next;
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *base;
static size_t used[DEVICES], next_[DEVICES];
static block *blocks, *pinned;

static int device_of(const void *p) { /* -1: host memory */
    if (!base || (char *)p < base || (char *)p >= base + DEVICES * SPAN) return -1;
    return (int)(((char *)p - base) / SPAN);
}

static void reserve(void) {
    if (base) return;
    base = mmap(0, DEVICES * SPAN, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) abort();
}

static void keep(block **list, void *at, size_t size) {
    block *b = malloc(sizeof *b);
    *b = (block){at, size, *list};
    *list = b;
}

static size_t drop(block **list, void *at) {
    for (block **b = list; *b; b = &(*b)->next)
        if ((*b)->at == at) {
            block *old = *b;
            size_t size = old->size;
            *b = old->next;
            free(old);
            return size;
        }
    return 0;
}

int cudaMalloc(void **p, size_t n) {
    int d = current_device(), result = cudaErrorMemoryAllocation;
    count(&c_mallocs, 1);
    pthread_mutex_lock(&lock);
    reserve();
    *p = NULL;
    if (used[d] + n <= DEVICE_BYTES - RESERVED) {
        *p = base + d * SPAN + next_[d];
        keep(&blocks, *p, n);
        next_[d] += (n + (2 << 20) - 1) & ~((2ULL << 20) - 1);
        if (next_[d] > SPAN) TOO_MANY("allocations");
        used[d] += n;
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cudaFree(void *p) {
    if (!p) return 0;
    count(&c_frees, 1);
    pthread_mutex_lock(&lock);
    int d = device_of(p);
    if (d >= 0) used[d] -= drop(&blocks, p);
    pthread_mutex_unlock(&lock);
    return 0;
}

int cudaMemGetInfo(size_t *free_, size_t *total) {
    *total = DEVICE_BYTES;
    *free_ = DEVICE_BYTES - RESERVED - used[current_device()];
    return 0;
}

int cudaHostAlloc(void **p, size_t n, unsigned flags) {
    (void)flags;
    count(&c_pinned, 1);
    *p = aligned_alloc(4096, (n + 4095) & ~4095ULL);
    pthread_mutex_lock(&lock);
    keep(&pinned, *p, n);
    pthread_mutex_unlock(&lock);
    return *p ? 0 : cudaErrorMemoryAllocation;
}

int cudaFreeHost(void *p) {
    pthread_mutex_lock(&lock);
    drop(&pinned, p);
    pthread_mutex_unlock(&lock);
    free(p);
    return 0;
}

int cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p) {
    memset(a, 0, sizeof *a);
    pthread_mutex_lock(&lock);
    int d = device_of(p);
    if (d >= 0) {
        a->type = cudaMemoryTypeDevice;
        a->device = d;
        a->devicePointer = (void *)p;
    }
    for (block *b = pinned; b && d < 0; b = b->next)
        if ((char *)p >= b->at && (char *)p < b->at + b->size) {
            a->type = cudaMemoryTypeHost;
            a->hostPointer = a->devicePointer = (void *)p;
        }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int copy(void *to, const void *from, size_t n) {
    int t = device_of(to) >= 0, f = device_of(from) >= 0;
    if (t && f) count(&c_d2d, 1), count(&c_d2d_bytes, n);
    else if (t) count(&c_h2d, 1), count(&c_h2d_bytes, n);
    else if (f) count(&c_d2h, 1), count(&c_d2h_bytes, n), memset(to, 0, n);
    else memcpy(to, from, n);
    return 0;
}

int cudaStreamSynchronize(void *);
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    (void)kind, (void)stream;
    return copy(to, from, n);
}
int cudaMemcpy(void *to, const void *from, size_t n, int kind) {
    (void)kind;
    copy(to, from, n);
    return cudaStreamSynchronize(NULL);
}
int cudaMemcpyPeerAsync(void *to, int d, const void *from, int s, size_t n, void *stream) {
    (void)d, (void)s, (void)stream;
    return copy(to, from, n);
}

int cudaGetSymbolAddress(void **p, const void *symbol) {
    (void)symbol;
    reserve();
    return *p = base, 0;
}
int cudaDeviceGetDefaultMemPool(void **pool, int d) { return (void)d, *pool = (void *)0x10, 0; }

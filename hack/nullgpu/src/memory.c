/* Memory: addresses without pages, accounted per device. A host that touches one gets SIGSEGV, as on a real GPU.
 * Copies to the host bring zeros. A process that maps another's memory gets addresses of its own for it. Page-locked
 * memory gives its pages back when zeros come, so a program may hold more of it than the machine has. */
#include <dirent.h>
#include <signal.h>
#include <sys/mman.h>
#include "driver_types.h"
#include "nullgpu.h"

#define SPAN (8ULL << 40) /* addresses of one device; none is used twice */
#define PAGE (2ULL << 20)
#define RESERVED (1ULL << 30) /* what a CUDA context and the driver take */

/* Memory that another process may map; it is on one device. */
typedef struct {
    int pid, device;
    void *at;
    size_t size;
} exported;
_Static_assert(sizeof(exported) <= sizeof(cudaIpcMemHandle_t), "a handle holds it");

typedef struct block {
    char *at;
    size_t size;
    struct block *next;
    exported of; /* where it is mapped: of which process */
} block;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *base;
static size_t used[DEVICES], next_[DEVICES];
static block *blocks, *pinned, *mapped;

/* NULLGPU_MEMORY, in GiB, else that of the GPU that this one claims to be. */
size_t device_bytes(void) {
    static size_t bytes;
    if (!bytes) {
        const char *given = getenv("NULLGPU_MEMORY");
        bytes = given && atoi(given) > 0 ? (size_t)atoi(given) << 30 : DEVICE_BYTES;
    }
    return bytes;
}

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
    *b = (block){.at = at, .size = size, .next = *list};
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

/* Addresses of a device, in whole pages of the driver; the caller holds the lock. */
static char *addresses(int d, size_t n) {
    reserve();
    char *at = base + d * SPAN + next_[d];
    next_[d] += (n + PAGE - 1) & ~(PAGE - 1);
    if (next_[d] > SPAN) TOO_MANY("allocations");
    return at;
}

int cudaMalloc(void **p, size_t n) {
    int d = current_device(), result = cudaErrorMemoryAllocation;
    count(&c_mallocs, 1);
    pthread_mutex_lock(&lock);
    *p = NULL;
    if (used[d] + n <= device_bytes() - RESERVED) {
        *p = addresses(d, n);
        keep(&blocks, *p, n);
        used[d] += n;
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

int cudaFree(void *);

/* The driver's virtual memory, for torch's expandable segments: memory counts from its creation to its release. A handle
 * is an address that nobody uses, from which the device can be told. */
int null_memory_reserve(void **p, size_t n, size_t alignment, void *wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    pthread_mutex_lock(&lock);
    *p = addresses(current_device(), n);
    pthread_mutex_unlock(&lock);
    return 0;
}
int null_memory_create(void **handle, size_t n, const int *properties, unsigned long long flags) {
    (void)flags;
    int d = properties[3]; /* CUmemAllocationProp: type, requestedHandleTypes, location.type, location.id */
    int result = 2;        /* CUDA_ERROR_OUT_OF_MEMORY */
    count(&c_mallocs, 1);
    pthread_mutex_lock(&lock);
    if (used[d] + n <= device_bytes() - RESERVED) {
        *handle = addresses(d, PAGE);
        keep(&blocks, *handle, n);
        used[d] += n;
        result = 0;
    }
    pthread_mutex_unlock(&lock);
    return result;
}
int null_memory_release(void *handle) { return cudaFree(handle); }

/* CUDA leaves it undefined to free what another process has mapped; here it is an error. */
static void refuse_if_mapped(void *p) {
    char prefix[64], sentence[200];
    snprintf(prefix, sizeof prefix, "mapped-%d-%p-", getpid(), p);
    DIR *folder = opendir(meetings());
    for (struct dirent *e; folder && (e = readdir(folder));) {
        if (strncmp(e->d_name, prefix, strlen(prefix))) continue;
        int other = atoi(e->d_name + strlen(prefix));
        if (kill(other, 0)) continue;
        snprintf(sentence, sizeof sentence, "rank %d frees memory that process %d has mapped", own_rank(), other);
        fail(sentence);
    }
    if (folder) closedir(folder);
}

int cudaFree(void *p) {
    if (!p) return 0;
    count(&c_frees, 1);
    refuse_if_mapped(p);
    pthread_mutex_lock(&lock);
    int d = device_of(p);
    if (d >= 0) used[d] -= drop(&blocks, p);
    pthread_mutex_unlock(&lock);
    return 0;
}

static void mapping_file(char *path, size_t size, const exported *e) {
    snprintf(path, size, "%s/mapped-%d-%p-%d", meetings(), e->pid, e->at, getpid());
}

int cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *p) {
    int result = cudaErrorInvalidValue;
    pthread_mutex_lock(&lock);
    for (block *b = blocks; b && result; b = b->next)
        if ((char *)p >= b->at && (char *)p < b->at + b->size) {
            memset(handle, 0, sizeof *handle);
            *(exported *)handle = (exported){getpid(), machine_device(device_of(p)), b->at, b->size};
            result = 0;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

int cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) {
    (void)flags;
    exported e = *(exported *)&handle;
    char path[4096];
    if (e.pid == getpid()) return cudaErrorDeviceUninitialized; /* as in CUDA: not in the process that exported it */
    if (!e.pid || kill(e.pid, 0)) return cudaErrorInvalidResourceHandle;
    if (e.device != machine_device(current_device())) return cudaErrorPeerAccessUnsupported; /* stricter than CUDA */
    pthread_mutex_lock(&lock);
    reserve();
    *p = addresses(current_device(), e.size);
    mapping_file(path, sizeof path, &e);
    FILE *file = fopen(path, "w");
    if (file) fclose(file);
    keep(&mapped, *p, 0);
    mapped->of = e;
    pthread_mutex_unlock(&lock);
    return 0;
}

int cudaIpcCloseMemHandle(void *p) {
    int result = cudaErrorInvalidValue;
    pthread_mutex_lock(&lock);
    for (block *b = mapped; b && result; b = b->next)
        if (b->at == p) {
            char path[4096];
            mapping_file(path, sizeof path, &b->of);
            unlink(path);
            drop(&mapped, p);
            result = 0;
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

int cudaMemGetInfo(size_t *free_, size_t *total) {
    *total = device_bytes();
    *free_ = device_bytes() - RESERVED - used[current_device()];
    return 0;
}

/* vLLM reads host memory in its kernels. */
int cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { return (void)flags, *device = host, 0; }
int cudaMemcpy2DAsync(void) { return 0; }
int cudaHostAlloc(void **p, size_t n, unsigned flags) {
    (void)flags;
    count(&c_pinned, 1);
    n = (n + 4095) & ~4095ULL;
    *p = mmap(0, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*p == MAP_FAILED) return cudaErrorMemoryAllocation;
    pthread_mutex_lock(&lock);
    keep(&pinned, *p, n);
    pthread_mutex_unlock(&lock);
    count(&c_pinned_bytes, n);
    return 0;
}

int cudaFreeHost(void *p) {
    pthread_mutex_lock(&lock);
    size_t n = drop(&pinned, p);
    pthread_mutex_unlock(&lock);
    if (n) munmap(p, n), count(&c_pinned_bytes, -(long)n);
    return 0;
}

/* Zeros into host memory: whole pages of ours are given back, and read as zeros from then on. */
static void zeros(char *to, size_t n) {
    int ours = 0;
    pthread_mutex_lock(&lock);
    for (block *b = pinned; b && !ours; b = b->next) ours = to >= b->at && to + n <= b->at + b->size;
    pthread_mutex_unlock(&lock);
    char *first = (char *)(((uintptr_t)to + 4095) & ~4095ULL), *last = (char *)((uintptr_t)(to + n) & ~4095ULL);
    if (!ours || last <= first || madvise(first, last - first, MADV_DONTNEED)) {
        memset(to, 0, n);
        return;
    }
    memset(to, 0, first - to);
    memset(last, 0, to + n - last);
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
    else if (f) count(&c_d2h, 1), count(&c_d2h_bytes, n), zeros(to, n);
    else memcpy(to, from, n);
    return 0;
}

int cudaStreamSynchronize(void *);
int cudaMemcpyAsync(void *to, const void *from, size_t n, int kind, void *stream) {
    (void)kind;
    if (stream && device_of(from) >= 0 && device_of(to) < 0) count(&c_d2h_beside, 1);
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

/* What the parts of the null GPU share. Each .c file stands in for one part of CUDA or NCCL. */
#pragma once
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES 8                            /* GPUs of the machine */
#define DEVICE_BYTES (80ULL << 30)           /* memory of one, unless NULLGPU_MEMORY says otherwise */
#define TOO_MANY(what) (fprintf(stderr, "nullgpu: too many %s\n", what), abort())

/* What the devices claim to be; also for the driver, which is a library of its own. */
static inline int claimed(const char *variable, int unset) { /* "7.0" is 70 */
    const char *text = getenv(variable);
    int major, minor;
    return text && sscanf(text, "%d.%d", &major, &minor) == 2 ? 10 * major + minor : unset;
}
static inline int claimed_capability(void) { return claimed("NULLGPU_CAPABILITY", 80); }
static inline int claimed_cuda(void) { int v = claimed("NULLGPU_CUDA", 130); return v / 10 * 1000 + v % 10 * 10; }
static inline int visible_devices(int seen[DEVICES]) { /* as CUDA reads it; returns how many */
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    int n = 0;
    while (list && *list) {
        char *end;
        long d = strtol(list, &end, 10);
        if (end == list || d < 0 || d >= DEVICES || n == DEVICES) return n; /* what follows is ignored */
        seen[n++] = d;
        list = *end == ',' ? end + 1 : end;
    }
    if (!getenv("CUDA_VISIBLE_DEVICES")) while (n < DEVICES) seen[n] = n, n++;
    return n;
}
static inline void claimed_name(char *name, size_t size) {
    int capability = claimed_capability();
    if (capability == 80) snprintf(name, size, "NVIDIA A100-SXM4-80GB (null)");
    else snprintf(name, size, "null GPU of %d.%d", capability / 10, capability % 10);
}

/* counters.c */
typedef struct {
    const char *name;
    atomic_long value;
} counter;
extern counter c_launches, c_mallocs, c_frees, c_pinned, c_pinned_bytes, c_h2d, c_h2d_bytes, c_d2h, c_d2h_bytes, c_d2h_beside, c_d2d, c_d2d_bytes,
    c_synchronisations, c_communicators, c_collectives, c_sends, c_receives, c_mixed, c_receiving;
void count(counter *c, long by);

/* device.c */
int current_device(void);
int machine_device(int d); /* the machine's number of this process's device d */

/* memory.c */
size_t device_bytes(void);
int null_memory_reserve(void **p, size_t n, size_t alignment, void *wanted, unsigned long long flags);
int null_memory_create(void **handle, size_t n, const int *properties, unsigned long long flags);
int null_memory_release(void *handle);

/* streams.c: work that a stream waits for. `poll` returns 1 when it is done, 0 before, -1 after `fail`. */
typedef struct work {
    int (*poll)(struct work *);
    void (*describe)(struct work *, char *sentence, size_t size); /* what it waits for */
} work;
void enqueue(void *stream, work *w);
void fail(const char *sentence); /* every later synchronisation of this process returns an error with the sentence */
const char *failure(void);       /* that sentence, or NULL */

/* report.c */
const char *meetings(void);            /* the folder where processes meet */
int own_rank(void);                    /* how messages name this process */
double now(void);                      /* seconds */
void report_wait(const char *sentence); /* write what this process waits for, or nothing if NULL */

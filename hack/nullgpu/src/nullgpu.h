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

#define DEVICES 8                            /* GPUs that every process sees */
#define DEVICE_BYTES (80ULL << 30)           /* memory of one */
#define TOO_MANY(what) (fprintf(stderr, "nullgpu: too many %s\n", what), abort())

/* counters.c */
typedef struct {
    const char *name;
    atomic_long value;
} counter;
extern counter c_launches, c_mallocs, c_frees, c_pinned, c_h2d, c_h2d_bytes, c_d2h, c_d2h_bytes, c_d2d, c_d2d_bytes,
    c_synchronisations, c_communicators, c_collectives, c_sends, c_receives;
void count(counter *c, long by);

/* device.c */
int current_device(void);

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

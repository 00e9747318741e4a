/* NCCL: ranks meet, data does not travel. A communicator is a file that its ranks map.
 *
 * - Setting a communicator up blocks the host until all its ranks have come. Two of them on one device are an error.
 * - The first use blocks the host until the other side uses it too, as NCCL connects then: a send until the receiver
 *   receives from this rank for the first time, a collective until all ranks have come to their first.
 * - Later operations hold up their stream alone. A collective ends when all ranks have started it, a send when its
 *   receive has started. Real NCCL may end small sends earlier; nothing may rely on that.
 * - Sends match receives in order; unlike sizes, kinds or roots are an error that names both ranks.
 * - A communicator that is made with `blocking` 0 never blocks the host: its calls return ncclInProgress, and each
 *   ncclCommGetAsyncError moves set-up and first uses on.
 * - Nobody learns that a peer has died, frozen or aborted. NCCL may tell; nothing may rely on that. */
#include <fcntl.h>
#include <limits.h>
#include <sys/mman.h>
#include "nullgpu.h"

#define RANKS 16
#define RING 64 /* operations in flight: a rank is at most one group ahead of its peer */
#define MISSING INT_MIN

enum { ncclSuccess = 0, ncclInvalidUsage = 5, ncclRemoteError = 6, ncclInProgress = 7 };
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} ncclConfig; /* the beginning of NCCL's, which is longer in later versions */
typedef struct {
    char internal[128];
} ncclUniqueId;

typedef struct {
    atomic_ulong number; /* 1 for the first of its kind; written last */
    int kind, root;
    uint64_t bytes;
} operation;

enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, SEND, RECEIVE };
static const char *names[] = {"an all-reduce", "a broadcast", "a reduce",  "an all-gather", "a reduce-scatter",
                              "an all-to-all", "a send",      "a receive"};

typedef struct {
    atomic_int here[RANKS];
    int rank[RANKS], device[RANKS], version[RANKS]; /* how messages name it, its GPU, its NCCL */
    atomic_int uses[RANKS], sends[RANKS][RANKS], receives[RANKS][RANKS];
    operation collective[RANKS][RING], send[RANKS][RANKS][RING], receive[RANKS][RANKS][RING];
} meeting;

#define PARTS 64
typedef struct comm comm;
typedef struct {
    comm *c;
    void *stream;
    int kind, peer;
    uint64_t bytes, number;
} part;

struct comm {
    int n, r;
    meeting *m;
    atomic_int aborted;
    uint64_t collectives, sends[RANKS], receives[RANKS];
    /* Of one that does not block: */
    int polled, set_up, result, waiting_count;
    part waiting[PARTS]; /* operations that are not connected yet */
    double since, told;
};

typedef struct {
    work work;
    comm *c;
    int posted, count;
    part parts[PARTS];
} group;

static _Thread_local int depth, held_count;
static _Thread_local part held[8 * PARTS];
static size_t width(int type) { return (size_t[]){1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}[type]; }

/* "ranks 0, 3", those that have come. */
static const char *members(comm *c, char *text, size_t size) {
    size_t at = snprintf(text, size, "ranks ");
    for (int i = 0, first = 1; i < c->n && at < size; i++)
        if (atomic_load(&c->m->here[i])) at += snprintf(text + at, size - at, first ? "%d" : ", %d", c->m->rank[i]), first = 0;
    return text;
}

typedef int ready_check(comm *, part *);
typedef void description(comm *, part *, char *, size_t);

/* Block the host until `ready`; the sentence is reported after a second. */
static int wait_for(comm *c, ready_check *ready, part *p, description *describe) {
    double start = now(), told = 0;
    while (!ready(c, p)) {
        if (atomic_load(&c->aborted)) return ncclRemoteError;
        if (now() - start > 1 && now() - told > 1) {
            char sentence[600];
            describe(c, p, sentence, sizeof sentence);
            report_wait(sentence);
            told = now();
        }
        usleep(500);
    }
    if (told) report_wait(NULL);
    return 0;
}

/* ------------------------------------------------------------ communicators */

int ncclGetUniqueId(ncclUniqueId *id) {
    int file = open("/dev/urandom", O_RDONLY);
    ssize_t n = read(file, id, sizeof *id);
    close(file);
    return n == sizeof *id ? 0 : 2;
}

static int all_here(comm *c, part *p) {
    (void)p;
    for (int i = 0; i < c->n; i++)
        if (!atomic_load(&c->m->here[i])) return 0;
    return 1;
}
static void who_is_missing(comm *c, part *p, char *text, size_t size) {
    char who[200];
    int missing = 0;
    (void)p;
    for (int i = 0; i < c->n; i++) missing += !atomic_load(&c->m->here[i]);
    snprintf(text, size, "sets up a communicator of %d ranks: %s have come, %d missing", c->n, members(c, who, sizeof who),
             missing);
}

int ncclGetVersion(int *v) {
    const char *said = getenv("NULLGPU_NCCL_VERSION");
    return *v = said ? atoi(said) : 22907, 0;
}

/* All have come: two of them on one device are an error, and so are unlike versions. */
static int set_up(comm *c) {
    for (int i = 0; i < c->n; i++) {
        if (c->m->version[i] != c->m->version[c->r]) {
            fprintf(stderr, "nullgpu: ranks %d and %d have NCCL %d and %d\n", c->m->rank[i], c->m->rank[c->r],
                    c->m->version[i], c->m->version[c->r]);
            return ncclInvalidUsage;
        }
        if (i != c->r && c->m->device[i] == c->m->device[c->r]) {
            fprintf(stderr, "nullgpu: Duplicate GPU detected: ranks %d and %d are both on device %d\n", c->m->rank[i],
                    c->m->rank[c->r], c->m->device[c->r]);
            return ncclInvalidUsage;
        }
    }
    count(&c_communicators, 1);
    return 0;
}

int ncclCommInitRankConfig(comm **out, int n, ncclUniqueId id, int r, void *config) {
    char path[4096];
    int at = snprintf(path, sizeof path, "%s/", meetings());
    if (n > RANKS) TOO_MANY("ranks in a communicator");
    for (int i = 0; i < 16; i++) at += sprintf(path + at, "%02x", (unsigned char)id.internal[i]);
    int file = open(path, O_CREAT | O_RDWR, 0666);
    if (file < 0 || ftruncate(file, sizeof(meeting))) return 2;
    comm *c = calloc(1, sizeof *c);
    *c = (comm){.n = n, .r = r, .m = mmap(0, sizeof(meeting), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0)};
    close(file);
    if (c->m == MAP_FAILED) return 2;
    c->m->rank[r] = own_rank();
    c->m->device[r] = machine_device(current_device());
    ncclGetVersion(&c->m->version[r]);
    atomic_store(&c->m->here[r], 1);
    *out = c;
    if (config && ((ncclConfig *)config)->blocking == 0) {
        c->polled = 1;
        c->since = now();
        return ncclInProgress;
    }
    wait_for(c, all_here, NULL, who_is_missing);
    return set_up(c);
}
int ncclCommInitRank(comm **out, int n, ncclUniqueId id, int r) { return ncclCommInitRankConfig(out, n, id, r, NULL); }

int ncclCommAbort(comm *c) { return atomic_store(&c->aborted, 1), 0; } /* its memory stays: a queue may hold it */
int ncclCommDestroy(comm *c) { return (void)c, 0; }
int ncclCommCount(comm *c, int *n) { return *n = c->n, 0; }
int ncclCommUserRank(comm *c, int *r) { return *r = c->r, 0; }
const char *ncclGetErrorString(int e) { return e == ncclInvalidUsage ? "invalid usage" : e ? "null error" : "no error"; }
const char *ncclGetLastError(comm *c) { return (void)c, failure() ? failure() : ""; }

/* Not rehearsed: a caller gets an error, not nonsense. */
int ncclCommSplit(void) { return fprintf(stderr, "nullgpu: ncclCommSplit is not rehearsed\n"), ncclInvalidUsage; }
int ncclCommShrink(void) { return fprintf(stderr, "nullgpu: ncclCommShrink is not rehearsed\n"), ncclInvalidUsage; }

/* ------------------------------------------------------------ operations */

static void describe_part(comm *c, part *p, char *text, size_t size) {
    char who[200];
    if (p->kind == SEND || p->kind == RECEIVE)
        snprintf(text, size, "waits in %s of %llu bytes %s rank %d (message %llu between them)", names[p->kind],
                 (unsigned long long)p->bytes, p->kind == SEND ? "to" : "from", c->m->rank[p->peer],
                 (unsigned long long)p->number);
    else
        snprintf(text, size, "waits in %s of %llu bytes (collective %llu of %s)", names[p->kind],
                 (unsigned long long)p->bytes, (unsigned long long)p->number, members(c, who, sizeof who));
}

static void announce(operation *o, part *p) {
    o->kind = p->kind;
    o->root = p->kind == SEND || p->kind == RECEIVE ? 0 : p->peer;
    o->bytes = p->bytes;
    atomic_store(&o->number, p->number);
}

static operation *slot(comm *c, part *p, int rank, int other_side) {
    int k = p->number % RING;
    if (p->kind == SEND) return other_side ? &c->m->receive[c->r][p->peer][k] : &c->m->send[c->r][p->peer][k];
    if (p->kind == RECEIVE) return other_side ? &c->m->send[p->peer][c->r][k] : &c->m->receive[p->peer][c->r][k];
    return &c->m->collective[rank][k];
}

static int odd(part *p, operation *other) {
    if (p->kind == SEND || p->kind == RECEIVE) return other->bytes != p->bytes;
    return other->kind != p->kind || other->bytes != p->bytes || other->root != p->peer;
}

/* 1 done, 0 not yet, -1 at odds with another rank. */
static int poll_part(comm *c, part *p) {
    int pair = p->kind == SEND || p->kind == RECEIVE;
    for (int i = 0; i < c->n; i++) {
        if (i == c->r || (pair && i != p->peer)) continue;
        operation *other = slot(c, p, i, 1);
        if (atomic_load(&other->number) < p->number) return 0;
        if (!odd(p, other)) continue;
        char text[700], mine[300];
        describe_part(c, p, mine, sizeof mine);
        snprintf(text, sizeof text, "rank %d and rank %d are at odds: rank %d %s, rank %d is in %s of %llu bytes", c->m->rank[c->r],
                 c->m->rank[i], c->m->rank[c->r], mine, c->m->rank[i], names[other->kind], (unsigned long long)other->bytes);
        if (!pair && other->root != p->peer)
            snprintf(text + strlen(text), sizeof text - strlen(text), "; their roots are %d and %d", p->peer, other->root);
        fail(text);
        return -1;
    }
    return 1;
}

static long receiving; /* receives that have started and wait; under the lock of the streams */

static int poll_group(work *w) {
    group *g = (group *)w;
    if (atomic_load(&g->c->aborted)) return 1;
    if (!g->posted)
        for (int i = 0; i < g->count; i++) {
            announce(slot(g->c, &g->parts[i], g->c->r, 0), &g->parts[i]);
            if (g->parts[i].kind == RECEIVE && ++receiving > atomic_load(&c_receiving.value)) count(&c_receiving, 1);
        }
    g->posted = 1;
    int all = 1;
    for (int i = 0; i < g->count; i++) {
        int done = poll_part(g->c, &g->parts[i]);
        if (done < 0) return -1;
        all &= done;
    }
    for (int i = 0; all && i < g->count; i++) receiving -= g->parts[i].kind == RECEIVE;
    return all;
}
static void describe_group(work *w, char *text, size_t size) {
    group *g = (group *)w;
    for (int i = 0; i < g->count; i++)
        if (!poll_part(g->c, &g->parts[i])) return describe_part(g->c, &g->parts[i], text, size);
    snprintf(text, size, "waits for nothing");
}

/* First use: NCCL connects, with the host. */
static int connected(comm *c, part *p) {
    if (p->kind == SEND) return atomic_load(&c->m->receives[p->peer][c->r]);
    if (p->kind == RECEIVE) return atomic_load(&c->m->sends[p->peer][c->r]);
    for (int i = 0; i < c->n; i++)
        if (!atomic_load(&c->m->uses[i])) return 0;
    return 1;
}
static void describe_connecting(comm *c, part *p, char *text, size_t size) {
    char what[400];
    describe_part(c, p, what, sizeof what);
    snprintf(text, size, "connects for its first operation and %s", what);
}
static void offer(part *p) {
    comm *c = p->c;
    atomic_store(p->kind == SEND      ? &c->m->sends[c->r][p->peer]
                 : p->kind == RECEIVE ? &c->m->receives[c->r][p->peer]
                                      : &c->m->uses[c->r],
                 1);
}

/* The last communicator of each stream that carried messages. A message behind another communicator's, or before it,
 * waits for what has nothing to do with it. */
static void carry(comm *c, void *stream, int pair) {
    static struct {
        void *stream;
        comm *last;
        int pair;
    } seen[1024];
    static int known;
    static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&guard);
    int i = 0;
    while (i < known && seen[i].stream != stream) i++;
    if (i == sizeof seen / sizeof *seen) TOO_MANY("streams");
    if (i < known && seen[i].last != c && (pair || seen[i].pair)) count(&c_mixed, 1);
    seen[i].stream = stream, seen[i].last = c, seen[i].pair = pair;
    known += i == known;
    pthread_mutex_unlock(&guard);
}

int ncclGroupStart(void) { return depth++, 0; }

/* Hand the operations to their streams; what is on one communicator and stream runs together. */
static void launch(part *parts, int n) {
    for (int i = 0; i < n; i++) {
        if (!parts[i].c) continue;
        group *g = calloc(1, sizeof *g);
        g->work = (work){poll_group, describe_group};
        g->c = parts[i].c;
        void *stream = parts[i].stream;
        for (int j = i; j < n; j++)
            if (parts[j].c == g->c && parts[j].stream == stream) {
                if (g->count == PARTS) TOO_MANY("operations in a group");
                g->parts[g->count++] = parts[j];
                parts[j].c = NULL;
            }
        carry(g->c, stream, g->parts[0].kind == SEND || g->parts[0].kind == RECEIVE);
        enqueue(stream, &g->work);
    }
}

int ncclGroupEnd(void) {
    if (--depth) return 0;
    int n = held_count, result = 0, later = 0;
    held_count = 0;
    for (int i = 0; i < n; i++) offer(&held[i]);
    for (int i = 0; i < n && !result; i++) {
        comm *c = held[i].c;
        if (!c->polled) {
            result = wait_for(c, connected, &held[i], describe_connecting);
            continue;
        }
        if (!c->set_up) return ncclInvalidUsage;
        if (c->waiting_count == PARTS) TOO_MANY("operations in a group");
        if (!c->waiting_count) c->since = now();
        c->waiting[c->waiting_count++] = held[i];
        held[i].c = NULL;
        later = 1;
    }
    if (result) return result;
    launch(held, n);
    return later ? ncclInProgress : 0;
}

/* Report after a second what a communicator that does not block waits for. */
static int in_progress(comm *c, part *p, description *describe) {
    if (now() - c->since > 1 && now() - c->told > 1) {
        char sentence[600];
        describe(c, p, sentence, sizeof sentence);
        report_wait(sentence);
        c->told = now();
    }
    return ncclInProgress;
}

static int advance(comm *c) {
    if (atomic_load(&c->aborted)) return ncclRemoteError;
    if (!c->polled || c->result) return c->result;
    if (!c->set_up) {
        if (!all_here(c, NULL)) return in_progress(c, NULL, who_is_missing);
        c->set_up = 1;
        c->result = set_up(c);
    }
    for (int i = 0; i < c->waiting_count; i++)
        if (!connected(c, &c->waiting[i])) return in_progress(c, &c->waiting[i], describe_connecting);
    launch(c->waiting, c->waiting_count);
    c->waiting_count = 0;
    if (c->told) c->told = 0, report_wait(NULL);
    return c->result;
}
int ncclCommGetAsyncError(comm *c, int *error) { return *error = advance(c), 0; }

static int add(comm *c, void *stream, int kind, int peer, size_t bytes) {
    if (held_count == sizeof held / sizeof *held) TOO_MANY("operations in a group");
    uint64_t *number = kind == SEND ? &c->sends[peer] : kind == RECEIVE ? &c->receives[peer] : &c->collectives;
    count(kind == SEND ? &c_sends : kind == RECEIVE ? &c_receives : &c_collectives, 1);
    ncclGroupStart();
    held[held_count++] = (part){c, stream, kind, peer, bytes, ++*number};
    return ncclGroupEnd();
}

int ncclSend(const void *from, size_t n, int type, int peer, comm *c, void *stream) {
    return (void)from, add(c, stream, SEND, peer, n * width(type));
}
int ncclRecv(void *to, size_t n, int type, int peer, comm *c, void *stream) {
    return (void)to, add(c, stream, RECEIVE, peer, n * width(type));
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, comm *c, void *stream) {
    return (void)from, (void)to, (void)op, add(c, stream, ALL_REDUCE, 0, n * width(type));
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, comm *c, void *stream) {
    return (void)from, (void)to, add(c, stream, BROADCAST, root, n * width(type));
}
int ncclBcast(void *at, size_t n, int type, int root, comm *c, void *stream) {
    return (void)at, add(c, stream, BROADCAST, root, n * width(type));
}
int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, comm *c, void *stream) {
    return (void)from, (void)to, (void)op, add(c, stream, REDUCE, root, n * width(type));
}
int ncclAllGather(const void *from, void *to, size_t n, int type, comm *c, void *stream) {
    return (void)from, (void)to, add(c, stream, ALL_GATHER, 0, n * width(type));
}
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, comm *c, void *stream) {
    return (void)from, (void)to, (void)op, add(c, stream, REDUCE_SCATTER, 0, n * width(type));
}
int ncclAlltoAll(const void *from, void *to, size_t n, int type, comm *c, void *stream) {
    return (void)from, (void)to, add(c, stream, ALL_TO_ALL, 0, n * width(type));
}

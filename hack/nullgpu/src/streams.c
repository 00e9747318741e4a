/* Streams and events. Kernels take no time, so a stream is a queue of what can hold it up: communication, events of
 * other streams that it waits for, and events that it records. A thread moves the queues on while the host computes. */
#include "driver_types.h"
#include "nullgpu.h"

typedef struct {
    uint64_t recorded, done; /* how often it was recorded, and how many of these were reached */
    double at;               /* when the last of these was reached, seconds */
} event;

typedef struct item {
    enum { WORK, WAIT, RECORD } kind;
    work *work;
    event *event;
    uint64_t ticket;
    struct item *next;
} item;

typedef struct stream {
    item *head, **tail;
    double since; /* how long its head has been there */
    struct stream *next;
    int device, priority;
} stream;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;
static pthread_t mover;
static int moving;
static stream *streams, *defaults[DEVICES];
static char failed[1024];
static atomic_int has_failed;
static long moves; /* how many items have gone through */

const char *failure(void) { return atomic_load(&has_failed) ? failed : NULL; }

void fail(const char *sentence) {
    if (has_failed) return;
    snprintf(failed, sizeof failed, "%s", sentence);
    fprintf(stderr, "nullgpu: %s\n", failed);
    atomic_store(&has_failed, 1);
}

static stream *new_stream(int priority) {
    stream *s = calloc(1, sizeof *s);
    s->tail = &s->head;
    s->priority = priority;
    s->device = current_device();
    s->next = streams;
    streams = s;
    return s;
}

static stream *of(void *handle) { /* NULL, 1 and 2 are a device's default stream */
    if ((uintptr_t)handle > 2) return handle;
    stream **s = &defaults[current_device()];
    if (!*s) *s = new_stream(0);
    return *s;
}

/* Whether the head of a stream is through. */
static int through(item *i) {
    if (i->kind == WORK) return i->work->poll(i->work) == 1;
    if (i->kind == WAIT) return i->event->done >= i->ticket;
    if (i->ticket > i->event->done) i->event->done = i->ticket, i->event->at = now();
    return 1;
}

/* Move every stream as far as it goes; returns whether anything is left. */
static int move(void) {
    int left, moved;
    do {
        left = moved = 0;
        for (stream *s = streams; s; s = s->next) {
            while (s->head && !failure() && through(s->head)) {
                item *i = s->head;
                if (!(s->head = i->next)) s->tail = &s->head;
                if (i->kind == WORK) free(i->work);
                free(i);
                s->since = now();
                moved = 1;
                moves++;
            }
            left |= s->head != NULL;
        }
    } while (moved);
    return left;
}

/* What the stream that has stood still longest waits for. */
static int describe_oldest(char *sentence, size_t size) {
    stream *oldest = NULL;
    for (stream *s = streams; s; s = s->next)
        if (s->head && s->head->kind == WORK && (!oldest || s->since < oldest->since)) oldest = s;
    if (oldest) oldest->head->work->describe(oldest->head->work, sentence, size);
    return oldest != NULL;
}

/* The longer a process has waited, the less often it looks: many of them share few cores. */
static void pause_for(int *microseconds) {
    usleep(*microseconds);
    if (*microseconds < 2000) *microseconds *= 2;
}

static void *keep_moving(void *unused) {
    int pause = 100;
    pthread_mutex_lock(&lock);
    for (;;) {
        long before = moves;
        if (!move()) {
            pthread_cond_wait(&wake, &lock);
            pause = 100;
            continue;
        }
        if (moves != before) pause = 100;
        pthread_mutex_unlock(&lock);
        pause_for(&pause);
        pthread_mutex_lock(&lock);
    }
    return unused;
}

static void append(stream *s, item i) {
    item *copy = malloc(sizeof *copy);
    *copy = i;
    copy->next = NULL;
    if (!s->head) s->since = now();
    *s->tail = copy;
    s->tail = &copy->next;
    if (!move()) return;
    if (!moving) moving = !pthread_create(&mover, NULL, keep_moving, NULL);
    pthread_cond_signal(&wake);
}

void enqueue(void *handle, work *w) {
    pthread_mutex_lock(&lock);
    append(of(handle), (item){WORK, .work = w});
    pthread_mutex_unlock(&lock);
}

/* Block the host until `ready(what)`; what it waits for is reported after a second. */
static int synchronise(int (*ready)(void *), void *what) {
    count(&c_synchronisations, 1);
    double told = now();
    int reported = 0, pause = 100;
    for (;;) {
        char sentence[900];
        pthread_mutex_lock(&lock);
        move();
        int done = ready(what), tell = !done && now() - told > 1 && describe_oldest(sentence, sizeof sentence);
        pthread_mutex_unlock(&lock);
        if (tell) report_wait(sentence), told = now(), reported = 1;
        if (reported && (done || failure())) report_wait(NULL);
        if (failure()) return cudaErrorLaunchFailure;
        if (done) return 0;
        pause_for(&pause);
    }
}

static int stream_ready(void *s) { return ((stream *)s)->head == NULL; }
static int event_ready(void *e) { return ((event *)e)->done >= ((event *)e)->recorded; }
static int device_ready(void *d) {
    for (stream *s = streams; s; s = s->next)
        if (s->device == *(int *)d && s->head) return 0;
    return 1;
}
static int query(int (*ready)(void *), void *what) {
    pthread_mutex_lock(&lock);
    move();
    int done = ready(what);
    pthread_mutex_unlock(&lock);
    return failure() ? cudaErrorLaunchFailure : done ? 0 : cudaErrorNotReady;
}
static stream *locked_of(void *handle) {
    pthread_mutex_lock(&lock);
    stream *s = of(handle);
    pthread_mutex_unlock(&lock);
    return s;
}

int cudaStreamCreateWithPriority(void **s, unsigned flags, int priority) {
    (void)flags;
    pthread_mutex_lock(&lock);
    *s = new_stream(priority);
    pthread_mutex_unlock(&lock);
    return 0;
}
int cudaStreamCreateWithFlags(void **s, unsigned flags) { return cudaStreamCreateWithPriority(s, flags, 0); }
int cudaStreamCreate(void **s) { return cudaStreamCreateWithPriority(s, 0, 0); }
int cudaStreamDestroy(void *s) { return (void)s, 0; } /* a stream that is in use must go on; few are made */
int cudaStreamGetPriority(void *s, int *priority) { return *priority = locked_of(s)->priority, 0; }
int cudaStreamSynchronize(void *s) { return synchronise(stream_ready, locked_of(s)); }
int cudaStreamQuery(void *s) { return query(stream_ready, locked_of(s)); }
int cudaDeviceSynchronize(void) {
    int d = current_device();
    return synchronise(device_ready, &d);
}

int cudaEventCreateWithFlags(void **e, unsigned flags) { return (void)flags, *e = calloc(1, sizeof(event)), 0; }
int cudaIpcGetEventHandle(char *handle, void *e) { return (void)e, *handle = 0, 0; }
/* The same event in another process: what it waits for there has happened. */
int cudaIpcOpenEventHandle(void **e, cudaIpcEventHandle_t handle) { return (void)handle, cudaEventCreateWithFlags(e, 0); }
int cudaEventCreate(void **e) { return cudaEventCreateWithFlags(e, 0); }
int cudaEventDestroy(void *e) { return (void)e, 0; } /* a queue may hold it; an event is small */
int cudaEventRecord(void *e, void *s) {
    pthread_mutex_lock(&lock);
    append(of(s), (item){RECORD, .event = e, .ticket = ++((event *)e)->recorded});
    pthread_mutex_unlock(&lock);
    return 0;
}
int cudaEventRecordWithFlags(void *e, void *s, unsigned flags) { return (void)flags, cudaEventRecord(e, s); }
int cudaStreamWaitEvent(void *s, void *e, unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    append(of(s), (item){WAIT, .event = e, .ticket = ((event *)e)->recorded});
    pthread_mutex_unlock(&lock);
    return 0;
}
int cudaEventSynchronize(void *e) { return synchronise(event_ready, e); }
int cudaEventQuery(void *e) { return query(event_ready, e); }
int cudaEventElapsedTime(float *ms, void *a, void *b) {
    pthread_mutex_lock(&lock);
    move();
    int done = event_ready(a) && event_ready(b);
    *ms = (((event *)b)->at - ((event *)a)->at) * 1e3;
    pthread_mutex_unlock(&lock);
    return failure() ? cudaErrorLaunchFailure : done ? 0 : cudaErrorNotReady;
}

/* A function on the host runs at once: its stream is not waited for. */
int cudaLaunchHostFunc(void *s, void (*f)(void *), void *data) { return (void)s, f(data), 0; }

/* Nothing is ever captured into a graph. */
int cudaStreamIsCapturing(void *s, int *status) { return (void)s, *status = 0, 0; }
int cudaStreamGetCaptureInfo(void *s, int *status, unsigned long long *id) {
    (void)s;
    if (status) *status = 0;
    if (id) *id = 0;
    return 0;
}

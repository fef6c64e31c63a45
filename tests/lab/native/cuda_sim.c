/* A CUDA driver without a GPU: two devices whose memory the host may not touch, and streams that run late.
 *
 * Device memory is a sparse file with two mappings. The one whose addresses are given out is closed to everybody: a
 * touch by the host is noted by name and then let through. The streams' threads use the other. Each stream runs on a
 * thread of its own, which ends when there is nothing to do, in order, and not before a time that is drawn from a
 * seed, or until somebody waits for it.
 *
 * A kernel holds one of its device's multiprocessors while it runs, and a copy the engine of its direction. Where
 * none is free it waits, whoever waits for it; what is behind it in its stream does too, and nothing else.
 *
 * What a real driver would only sometimes punish is noted (sim_misuses): a wrong context, memory that was freed or
 * never registered, a copy beyond an allocation, the default stream. The real names do what the CUDA driver API says
 * of them, as far as fskv uses it; sim_* is for tests.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_IMAGE = 200, INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ALREADY_REGISTERED = 712, NOT_REGISTERED = 713,
    CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901
};
enum { NUM_DEVICES = 2, GLOBAL_MODE = 0, RELAXED_MODE = 2, PIECE = 8192, ILLEGAL_ADDRESS = 700 };
#define REGION ((size_t)64 << 30)
#define GAP ((size_t)2 << 20)

typedef struct Stream Stream;
typedef struct { int device; } Context;
typedef struct { Context *context; bool loaded; char *ptx; unsigned num_threads, num_parameters; } Module;
typedef struct { unsigned flags; Context *context; Stream *stream; uint64_t at; } Event;
typedef void (*HostFunction)(void *);
typedef enum { COPY_IN, COPY_OUT, COPY_ON, LAUNCH, MARK, CALL } Kind;
/* Of a device, what one may hold so that another waits for it; PINNING is the driver's way to register memory. */
typedef enum { MULTIPROCESSORS, COPIES_IN, COPIES_OUT, PINNING, NOTHING, NUM_PARTS } Part;
static const int UNITS[NUM_PARTS] = {8, 1, 1, INT_MAX, INT_MAX};

typedef struct Op {
    struct Op *next;
    Kind kind;
    uint64_t number, target, source; /* addresses */
    size_t nbytes;
    unsigned num_programs;
    HostFunction call;
    void *argument;
    double not_before;
} Op;

struct Stream {
    Stream *next;
    Context *context;
    Op *first, *last;
    uint64_t submitted, done, demanded;
    bool ending, running;
    unsigned seed;
};

typedef struct { uint64_t at; size_t nbytes; int device; bool live; } Range;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards everything */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct {
    int fd;
    char *closed, *open;
    size_t used, live, limit;
    int retained, lost;
    int taken[NUM_PARTS], left[NUM_PARTS]; /* units: by what runs, and for all that runs */
} devices[NUM_DEVICES];
static Context contexts[NUM_DEVICES];
static Stream *streams, *defaults[NUM_DEVICES];
static Range *allocations, *registered;
static size_t num_allocations, num_registered;
static unsigned seed = 1;
static double late_s;
static bool capture_running, capture_spoilt, opened;
static int num_spinning;
static char misuses[1 << 16];
static struct { char name[64]; long calls; } counts[128];
static struct { char name[64]; int after, code; } plan[8];
static __thread Context *stack[16];
static __thread int depth, capture_mode;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Under the mutex, or in the handler of a signal. */
static void misuse(const char *format, ...)
{
    char line[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line, sizeof line, format, arguments);
    va_end(arguments);
    size_t used = strlen(misuses);
    if (used + strlen(line) + 2 < sizeof misuses)
        snprintf(misuses + used, sizeof misuses - used, "%s\n", line);
}

/* --- device memory ---------------------------------------------------------------------------- */

static struct sigaction before;

static void on_touch(int number, siginfo_t *info, void *context)
{
    char *at = info->si_addr;
    for (int d = 0; d < NUM_DEVICES; d++)
        if (devices[d].closed != NULL && at >= devices[d].closed && at < devices[d].closed + REGION) {
            misuse("the host touched device memory");
            mprotect((void *)((uintptr_t)at & ~(uintptr_t)4095), 4096, PROT_READ | PROT_WRITE);
            return;
        }
    sigaction(SIGSEGV, &before, NULL); /* not ours: it happens again */
}

static void open_devices(void)
{
    if (opened)
        return;
    opened = true;
    for (int d = 0; d < NUM_DEVICES; d++) {
        devices[d].fd = memfd_create("cuda_sim", MFD_CLOEXEC);
        if (ftruncate(devices[d].fd, (off_t)REGION) != 0)
            abort();
        devices[d].closed = mmap(NULL, REGION, PROT_NONE, MAP_SHARED | MAP_NORESERVE, devices[d].fd, 0);
        devices[d].open = mmap(NULL, REGION, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, devices[d].fd, 0);
        if (devices[d].closed == MAP_FAILED || devices[d].open == MAP_FAILED)
            abort();
        devices[d].limit = REGION;
        memcpy(devices[d].left, UNITS, sizeof UNITS);
        contexts[d].device = d;
    }
    struct sigaction action = {.sa_sigaction = on_touch, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, &before);
}

/* The address at which the streams' threads see device memory. */
uint64_t sim_open_address(uint64_t address)
{
    for (int d = 0; d < NUM_DEVICES; d++)
        if (address >= (uint64_t)devices[d].closed && address < (uint64_t)devices[d].closed + REGION)
            return address - (uint64_t)devices[d].closed + (uint64_t)devices[d].open;
    return 0;
}

static Range *found(Range *ranges, size_t num, uint64_t at, size_t nbytes, bool live_only)
{
    for (size_t i = num; i-- > 0;)
        if ((ranges[i].live || !live_only) && at >= ranges[i].at && at - ranges[i].at < ranges[i].nbytes &&
            nbytes <= ranges[i].nbytes - (at - ranges[i].at))
            return &ranges[i];
    return NULL;
}

/* Where a range of device memory is for the streams' threads; NULL and a misuse where it is none. */
static char *opened_at(const char *what, int device, uint64_t at, size_t nbytes)
{
    Range *range = found(allocations, num_allocations, at, nbytes, true);
    if (range == NULL) {
        if (found(allocations, num_allocations, at, nbytes, false))
            misuse("%s: freed memory", what);
        else if (found(allocations, num_allocations, at, 1, true))
            misuse("%s: beyond an allocation", what);
        else
            misuse("%s: no device memory", what);
        return NULL;
    }
    if (range->device != device) {
        misuse("%s: memory of another device", what);
        return NULL;
    }
    return devices[device].open + (at - (uint64_t)devices[device].closed);
}

static bool registered_at(const char *what, const void *at, size_t nbytes)
{
    if (found(registered, num_registered, (uint64_t)at, nbytes, true))
        return true;
    misuse("%s: unregistered host memory in an async copy", what);
    return false;
}

/* --- streams ------------------------------------------------------------------------------------ */

static void demand(Stream *stream, uint64_t number)
{
    if (stream->demanded < number) {
        stream->demanded = number;
        pthread_cond_broadcast(&changed);
    }
}

static void copy(void *to, const void *from, size_t nbytes)
{
    pthread_mutex_unlock(&mutex);
    memmove(to, from, nbytes);
    pthread_mutex_lock(&mutex);
}

/* Where a copy reads and writes; false and a misuse where it may not. */
static bool copies_at(const Op *op, int device, char **to, char **from)
{
    static const char *const NAMES[] = {"cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuMemcpyDtoDAsync"};
    const char *name = NAMES[op->kind];
    char *source = (char *)op->source, *target = (char *)op->target;
    if ((op->kind == COPY_IN && !registered_at(name, source, op->nbytes)) ||
        (op->kind == COPY_OUT && !registered_at(name, target, op->nbytes)))
        return false;
    *from = op->kind == COPY_IN ? source : opened_at(name, device, op->source, op->nbytes);
    *to = op->kind == COPY_OUT ? target : opened_at(name, device, op->target, op->nbytes);
    return *from != NULL && *to != NULL;
}

/* An illegal address costs the context: every call from now on answers so. */
static void lose_device(int device) { devices[device].lost = ILLEGAL_ADDRESS; }

static void run_programs(Op *op, int device, unsigned *seed_)
{
    char *table = opened_at("fskv_copy_pieces", device, op->source, 24 * (size_t)op->num_programs);
    if (table == NULL) {
        lose_device(device);
        return;
    }
    unsigned first = (unsigned)rand_r(seed_) % op->num_programs;
    for (unsigned i = 0; i < op->num_programs; i++) {
        uint64_t piece[3];
        memcpy(piece, table + 24 * (size_t)((first + i) % op->num_programs), 24);
        if (piece[2] > PIECE) {
            misuse("fskv_copy_pieces: a piece of %llu bytes", (unsigned long long)piece[2]);
            continue;
        }
        char *from = opened_at("fskv_copy_pieces", device, piece[0], piece[2]);
        char *to = opened_at("fskv_copy_pieces", device, piece[1], piece[2]);
        if (from != NULL && to != NULL)
            copy(to, from, piece[2]);
        else
            lose_device(device);
    }
}

/* Under the mutex, but for copies and calls of the host's. */
static void run_op(Stream *stream, Op *op)
{
    int device = stream->context->device;
    char *to, *from;
    switch (op->kind) {
    case COPY_IN:
    case COPY_OUT:
    case COPY_ON:
        if (copies_at(op, device, &to, &from))
            copy(to, from, op->nbytes);
        break;
    case LAUNCH:
        run_programs(op, device, &stream->seed);
        break;
    case CALL:
        pthread_mutex_unlock(&mutex);
        op->call(op->argument);
        pthread_mutex_lock(&mutex);
        break;
    case MARK:
        break;
    }
}

/* A call of the host's stands for a kernel of the engine's. */
static Part part_of(Kind kind)
{
    return kind == COPY_IN ? COPIES_IN : kind == COPY_OUT ? COPIES_OUT : kind == MARK ? NOTHING : MULTIPROCESSORS;
}

static void wait_for_change(double until)
{
    struct timespec end = {.tv_sec = (time_t)until, .tv_nsec = (long)((until - (double)(time_t)until) * 1e9)};
    pthread_cond_timedwait(&changed, &mutex, &end);
}

static void *work(void *argument)
{
    Stream *stream = argument;
    double idle_until = 0;
    pthread_mutex_lock(&mutex);
    while (stream->first != NULL || (!stream->ending && now() < idle_until)) {
        Op *op = stream->first;
        if (op == NULL) {
            wait_for_change(idle_until);
            continue;
        }
        int of = stream->context->device, *taken = &devices[of].taken[part_of(op->kind)];
        bool wanted = op->number <= stream->demanded || stream->ending;
        if (!wanted && now() < op->not_before) {
            wait_for_change(op->not_before);
            continue;
        }
        if (!devices[of].lost) {
            if (*taken >= devices[of].left[part_of(op->kind)]) {
                pthread_cond_wait(&changed, &mutex);
                continue;
            }
            ++*taken;
            run_op(stream, op);
            --*taken;
        }
        stream->first = op->next;
        if (stream->first == NULL)
            stream->last = NULL;
        stream->done = op->number;
        idle_until = now() + 0.2;
        free(op);
        pthread_cond_broadcast(&changed);
    }
    stream->running = false;
    pthread_mutex_unlock(&mutex);
    return NULL;
}

static Stream *new_stream(Context *context)
{
    Stream *stream = calloc(1, sizeof *stream);
    stream->context = context;
    stream->seed = seed += 7919;
    stream->next = streams;
    streams = stream;
    return stream;
}

static void wait_until(Stream *stream, uint64_t number)
{
    demand(stream, number);
    while (stream->done < number)
        pthread_cond_wait(&changed, &mutex);
}

/* --- every call --------------------------------------------------------------------------------- */

static Context *current(void) { return depth ? stack[depth - 1] : NULL; }

/* Counts it; returns the error that was asked for, or that the device is lost. */
static int begin(const char *name)
{
    pthread_mutex_lock(&mutex);
    open_devices();
    for (int i = 0; i < 128; i++) {
        if (counts[i].name[0] == '\0')
            snprintf(counts[i].name, sizeof counts[i].name, "%s", name);
        if (strcmp(counts[i].name, name) == 0) {
            counts[i].calls++;
            break;
        }
    }
    for (int i = 0; i < 8; i++)
        if (plan[i].code != 0 && strcmp(plan[i].name, name) == 0 && plan[i].after-- <= 0) {
            int code = plan[i].code;
            plan[i].code = 0;
            return code;
        }
    return current() != NULL ? devices[current()->device].lost : 0;
}

#define BEGIN(name)                                                                                      \
    int code = begin(name);                                                                              \
    if (code != 0)                                                                                       \
        return end(code)
#define IN_CONTEXT(name)                                                                                 \
    BEGIN(name);                                                                                         \
    if (current() == NULL) {                                                                             \
        misuse("%s: no current context", name);                                                          \
        return end(INVALID_CONTEXT);                                                                     \
    }
/* What a capture in the global mode forbids to all threads that did not relax it. */
#define SPOILS_CAPTURE()                                                                                 \
    if (capture_running && capture_mode != RELAXED_MODE) {                                               \
        capture_spoilt = true;                                                                           \
        return end(CAPTURE_UNSUPPORTED);                                                                 \
    }

static int end(int code)
{
    pthread_mutex_unlock(&mutex);
    return code;
}

/* The stream of a call, in its context. */
static Stream *stream_of(const char *name, Stream *stream)
{
    if (stream == NULL) {
        misuse("%s: on the default stream", name);
        if (defaults[current()->device] == NULL)
            defaults[current()->device] = new_stream(current());
        return defaults[current()->device];
    }
    for (Stream *s = streams; s != NULL; s = s->next)
        if (s == stream && !s->ending) {
            if (s->context == current())
                return s;
            misuse("%s: a stream of another context", name);
            return NULL;
        }
    misuse("%s: no stream", name);
    return NULL;
}

static void enqueue(Stream *stream, Op op)
{
    Op *copy = malloc(sizeof op);
    *copy = op;
    copy->next = NULL;
    copy->number = ++stream->submitted;
    copy->not_before = now() + late_s * (double)rand_r(&stream->seed) / RAND_MAX;
    *(stream->last ? &stream->last->next : &stream->first) = copy;
    stream->last = copy;
    pthread_cond_broadcast(&changed);
    pthread_t thread;
    if (!stream->running && pthread_create(&thread, NULL, work, stream) == 0) {
        stream->running = true;
        pthread_detach(thread);
    }
}

static int submit(const char *name, Stream *given, Op op)
{
    Stream *stream = stream_of(name, given);
    if (stream == NULL)
        return end(INVALID_HANDLE);
    enqueue(stream, op);
    return end(SUCCESS);
}

int cuInit(unsigned flags)
{
    BEGIN("cuInit");
    return end(SUCCESS);
}

int cuDeviceGet(int *device, int index)
{
    BEGIN("cuDeviceGet");
    *device = index;
    return end(index >= 0 && index < NUM_DEVICES ? SUCCESS : 101);
}

int cuDevicePrimaryCtxRetain(Context **context, int device)
{
    BEGIN("cuDevicePrimaryCtxRetain");
    devices[device].retained++;
    *context = &contexts[device];
    return end(devices[device].lost);
}

int cuCtxPushCurrent_v2(Context *context)
{
    BEGIN("cuCtxPushCurrent_v2");
    if (depth == 16) {
        misuse("cuCtxPushCurrent: contexts that nobody pops");
        return end(INVALID_VALUE);
    }
    stack[depth++] = context;
    return end(SUCCESS);
}

int cuCtxPopCurrent_v2(Context **context)
{
    BEGIN("cuCtxPopCurrent_v2");
    if (depth == 0)
        return end(INVALID_CONTEXT);
    *context = stack[--depth];
    return end(SUCCESS);
}

int cuCtxSetCurrent(Context *context)
{
    BEGIN("cuCtxSetCurrent");
    depth = depth ? depth : 1;
    stack[depth - 1] = context;
    return end(SUCCESS);
}

int cuThreadExchangeStreamCaptureMode(int *mode)
{
    BEGIN("cuThreadExchangeStreamCaptureMode");
    int was = capture_mode;
    capture_mode = *mode;
    *mode = was;
    return end(SUCCESS);
}

int cuStreamCreate(Stream **stream, unsigned flags)
{
    IN_CONTEXT("cuStreamCreate");
    if (!(flags & 1))
        misuse("cuStreamCreate: a stream that waits for the default stream");
    *stream = new_stream(current());
    return end(SUCCESS);
}

int cuStreamDestroy_v2(Stream *stream)
{
    IN_CONTEXT("cuStreamDestroy_v2");
    if (stream_of("cuStreamDestroy", stream) == NULL)
        return end(INVALID_HANDLE);
    stream->ending = true; /* what was launched still runs; the struct stays */
    pthread_cond_broadcast(&changed);
    return end(SUCCESS);
}

int cuStreamSynchronize(Stream *stream)
{
    IN_CONTEXT("cuStreamSynchronize");
    SPOILS_CAPTURE();
    if ((stream = stream_of("cuStreamSynchronize", stream)) == NULL)
        return end(INVALID_HANDLE);
    num_spinning++;
    wait_until(stream, stream->submitted);
    return end(devices[stream->context->device].lost);
}

int cuLaunchHostFunc(Stream *stream, HostFunction call, void *argument)
{
    IN_CONTEXT("cuLaunchHostFunc");
    return submit("cuLaunchHostFunc", stream, (Op){.kind = CALL, .call = call, .argument = argument});
}

int cuStreamBeginCapture_v2(Stream *stream, int mode)
{
    IN_CONTEXT("cuStreamBeginCapture_v2");
    capture_running = mode == GLOBAL_MODE;
    capture_spoilt = false;
    return end(SUCCESS);
}

int cuStreamEndCapture(Stream *stream, void **graph)
{
    IN_CONTEXT("cuStreamEndCapture");
    capture_running = false;
    *graph = NULL;
    return end(capture_spoilt ? CAPTURE_INVALIDATED : SUCCESS);
}

int cuEventCreate(Event **event, unsigned flags)
{
    IN_CONTEXT("cuEventCreate");
    *event = calloc(1, sizeof **event);
    (*event)->flags = flags;
    (*event)->context = current();
    return end(SUCCESS);
}

int cuEventDestroy_v2(Event *event)
{
    IN_CONTEXT("cuEventDestroy_v2");
    free(event);
    return end(SUCCESS);
}

int cuEventRecord(Event *event, Stream *stream)
{
    IN_CONTEXT("cuEventRecord");
    if ((stream = stream_of("cuEventRecord", stream)) == NULL)
        return end(INVALID_HANDLE);
    if (event->context != stream->context) {
        misuse("cuEventRecord: an event of another context");
        return end(INVALID_HANDLE);
    }
    event->stream = stream;
    event->at = stream->submitted + 1;
    return submit("cuEventRecord", stream, (Op){.kind = MARK});
}

int cuEventQuery(Event *event)
{
    BEGIN("cuEventQuery");
    SPOILS_CAPTURE();
    return end(event->stream == NULL || event->stream->done >= event->at ? SUCCESS : NOT_READY);
}

int cuEventSynchronize(Event *event)
{
    BEGIN("cuEventSynchronize");
    SPOILS_CAPTURE();
    if (event->stream == NULL)
        return end(SUCCESS);
    num_spinning += !(event->flags & 1);
    wait_until(event->stream, event->at);
    return end(devices[event->context->device].lost);
}

static void add(Range **ranges, size_t *num, Range range)
{
    *ranges = realloc(*ranges, (*num + 1) * sizeof **ranges);
    (*ranges)[(*num)++] = range;
}

int cuMemAlloc_v2(uint64_t *address, size_t nbytes)
{
    IN_CONTEXT("cuMemAlloc_v2");
    SPOILS_CAPTURE();
    int d = current()->device;
    size_t room = (nbytes + GAP - 1) / GAP * GAP;
    if (nbytes == 0)
        return end(INVALID_VALUE);
    if (devices[d].live + nbytes > devices[d].limit || devices[d].used + room + GAP > REGION)
        return end(OUT_OF_MEMORY);
    /* 256-aligned and no better. */
    *address = (uint64_t)devices[d].closed + devices[d].used + 256;
    devices[d].used += room + GAP;
    devices[d].live += nbytes;
    add(&allocations, &num_allocations, (Range){*address, nbytes, d, true});
    return end(SUCCESS);
}

int cuMemFree_v2(uint64_t address)
{
    IN_CONTEXT("cuMemFree_v2");
    SPOILS_CAPTURE();
    Range *range = found(allocations, num_allocations, address, 1, true);
    if (range == NULL || range->at != address || range->device != current()->device) {
        misuse("cuMemFree: not an allocation of this context");
        return end(INVALID_VALUE);
    }
    range->live = false;
    devices[range->device].live -= range->nbytes;
    size_t at = (address - (uint64_t)devices[range->device].closed) & ~(size_t)4095;
    madvise(devices[range->device].open + at, range->nbytes + 4096, MADV_REMOVE);
    return end(SUCCESS);
}

int cuMemHostRegister_v2(void *memory, size_t nbytes, unsigned flags)
{
    IN_CONTEXT("cuMemHostRegister_v2");
    SPOILS_CAPTURE();
    for (size_t i = 0; i < num_registered; i++)
        if (registered[i].live && (uint64_t)memory < registered[i].at + registered[i].nbytes &&
            registered[i].at < (uint64_t)memory + nbytes) {
            misuse("cuMemHostRegister: registered before");
            return end(ALREADY_REGISTERED);
        }
    add(&registered, &num_registered, (Range){(uint64_t)memory, nbytes, current()->device, true});
    while (devices[current()->device].left[PINNING] == 0)
        pthread_cond_wait(&changed, &mutex);
    return end(SUCCESS);
}

int cuMemHostUnregister(void *memory)
{
    IN_CONTEXT("cuMemHostUnregister");
    SPOILS_CAPTURE();
    for (size_t i = 0; i < num_registered; i++)
        if (registered[i].live && registered[i].at == (uint64_t)memory) {
            registered[i].live = false;
            return end(SUCCESS);
        }
    misuse("cuMemHostUnregister: not registered");
    return end(NOT_REGISTERED);
}

static int submit_copy(const char *name, Kind kind, uint64_t target, uint64_t source, size_t nbytes,
                       Stream *stream)
{
    IN_CONTEXT(name);
    char *to, *from;
    Op op = {.kind = kind, .target = target, .source = source, .nbytes = nbytes};
    if (!copies_at(&op, current()->device, &to, &from))
        return end(INVALID_VALUE);
    return submit(name, stream, op);
}

int cuMemcpyHtoDAsync_v2(uint64_t target, const void *source, size_t nbytes, Stream *stream)
{
    return submit_copy("cuMemcpyHtoDAsync_v2", COPY_IN, target, (uint64_t)source, nbytes, stream);
}

int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t nbytes, Stream *stream)
{
    return submit_copy("cuMemcpyDtoHAsync_v2", COPY_OUT, (uint64_t)target, source, nbytes, stream);
}

int cuMemcpyDtoDAsync_v2(uint64_t target, uint64_t source, size_t nbytes, Stream *stream)
{
    return submit_copy("cuMemcpyDtoDAsync_v2", COPY_ON, target, source, nbytes, stream);
}

int cuModuleLoadData(Module **module, const void *image)
{
    IN_CONTEXT("cuModuleLoadData");
    SPOILS_CAPTURE();
    if (memcmp(image, ".version", 8) != 0 && memcmp(image, "\177ELF", 4) != 0)
        return end(INVALID_IMAGE);
    *module = calloc(1, sizeof **module);
    **module = (Module){current(), true, strdup(image), 0, 0};
    return end(SUCCESS);
}

int cuModuleUnload(Module *module)
{
    IN_CONTEXT("cuModuleUnload");
    module->loaded = false;
    return end(SUCCESS);
}

/* A function is its module. What a launch has to bring is read from the PTX, as the driver does. */
int cuModuleGetFunction(Module **function, Module *module, const char *name)
{
    IN_CONTEXT("cuModuleGetFunction");
    char wanted[128];
    snprintf(wanted, sizeof wanted, ".entry %s(", name);
    char *at = strstr(module->ptx, wanted), *end_of = at ? strchr(at, ')') : NULL;
    if (end_of == NULL || strcmp(name, "fskv_copy_pieces") != 0)
        return end(NOT_FOUND);
    module->num_parameters = 0;
    for (char *one = strstr(at, ".param .u64"); one != NULL && one < end_of; one = strstr(one + 1, ".param .u64"))
        module->num_parameters++;
    if (sscanf(end_of, ") .reqntid %u", &module->num_threads) != 1)
        return end(INVALID_IMAGE);
    *function = module;
    return end(SUCCESS);
}

int cuLaunchKernel(Module *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned threads_x,
                   unsigned threads_y, unsigned threads_z, unsigned shared, Stream *stream, void **arguments,
                   void **extra)
{
    IN_CONTEXT("cuLaunchKernel");
    if (function->context != current() || !function->loaded) {
        misuse("cuLaunchKernel: a kernel of another context");
        return end(INVALID_HANDLE);
    }
    if (grid_x == 0 || grid_y != 1 || grid_z != 1 || threads_x != function->num_threads || threads_y != 1 ||
        threads_z != 1 || shared != 0) {
        misuse("cuLaunchKernel: a grid that the kernel was not made for");
        return end(INVALID_VALUE);
    }
    if (function->num_parameters != 1 || arguments[0] == NULL || extra != NULL) {
        misuse("cuLaunchKernel: other arguments than the kernel has");
        return end(INVALID_VALUE);
    }
    Op op = {.kind = LAUNCH, .num_programs = grid_x};
    memcpy(&op.source, arguments[0], 8);
    return submit("cuLaunchKernel", stream, op);
}

/* --- what kvikio asks as well ------------------------------------------------------------------- */

int cuDriverGetVersion(int *version)
{
    *version = 12040;
    return SUCCESS;
}

int cuDeviceGetCount(int *count)
{
    *count = NUM_DEVICES;
    return SUCCESS;
}

int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    *value = 0;
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }

int cuCtxGetCurrent(Context **context)
{
    *context = current();
    return SUCCESS;
}

int cuCtxGetDevice(int *device)
{
    IN_CONTEXT("cuCtxGetDevice");
    *device = current()->device;
    return end(SUCCESS);
}

/* Of memory that CUDA does not know the values are zero. */
int cuPointerGetAttributes(unsigned num, int *attributes, void **values, uint64_t at)
{
    BEGIN("cuPointerGetAttributes");
    Range *range = found(allocations, num_allocations, at, 1, true);
    for (unsigned i = 0; i < num; i++) {
        bool wide = attributes[i] == 1 || attributes[i] == 3;
        uint64_t value = range == NULL         ? 0
                         : attributes[i] == 1 ? (uint64_t)&contexts[range->device]
                         : attributes[i] == 2 ? 2 /* memory of a device */
                         : attributes[i] == 3 ? at
                                              : (uint64_t)range->device;
        memcpy(values[i], &value, wide ? 8 : 4);
    }
    return end(SUCCESS);
}

int cuPointerGetAttribute(void *value, int attribute, uint64_t at)
{
    pthread_mutex_lock(&mutex);
    bool known = found(allocations, num_allocations, at, 1, true) != NULL;
    pthread_mutex_unlock(&mutex);
    return known ? cuPointerGetAttributes(1, &attribute, &value, at) : INVALID_VALUE;
}

int cuMemGetAddressRange_v2(uint64_t *base, size_t *nbytes, uint64_t at)
{
    BEGIN("cuMemGetAddressRange_v2");
    Range *range = found(allocations, num_allocations, at, 1, true);
    if (range == NULL)
        return end(INVALID_VALUE);
    *base = range->at;
    *nbytes = range->nbytes;
    return end(SUCCESS);
}

int cuMemHostAlloc(void **memory, size_t nbytes, unsigned flags)
{
    IN_CONTEXT("cuMemHostAlloc");
    if (posix_memalign(memory, 4096, nbytes) != 0)
        return end(OUT_OF_MEMORY);
    add(&registered, &num_registered, (Range){(uint64_t)*memory, nbytes, current()->device, true});
    return end(SUCCESS);
}

int cuMemFreeHost(void *memory)
{
    int code = cuMemHostUnregister(memory);
    free(memory);
    return code;
}

int cuCtxCreate_v2(Context **context, unsigned flags, int device) { return NOT_FOUND; }
int cuCtxDestroy_v2(Context *context) { return NOT_FOUND; }

int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, Stream *stream)
{
    bool from_host = sim_open_address(source) == 0, to_host = sim_open_address(target) == 0;
    return from_host ? cuMemcpyHtoDAsync_v2(target, (void *)source, nbytes, stream)
           : to_host ? cuMemcpyDtoHAsync_v2((void *)target, source, nbytes, stream)
                     : cuMemcpyDtoDAsync_v2(target, source, nbytes, stream);
}

int cuGetErrorName(int error, const char **name)
{
    static __thread char text[32];
    snprintf(text, sizeof text, "simulated error %d", error);
    *name = text;
    return SUCCESS;
}

int cuGetErrorString(int error, const char **text) { return cuGetErrorName(error, text); }

/* --- for tests ------------------------------------------------------------------------------------ */

/* Forget misuses, counts and plans. Work is done up to `late` seconds after it was launched. */
void sim_reset(unsigned new_seed, double late)
{
    pthread_mutex_lock(&mutex);
    open_devices();
    seed = new_seed;
    late_s = late;
    misuses[0] = '\0';
    memset(counts, 0, sizeof counts);
    memset(plan, 0, sizeof plan);
    num_spinning = 0;
    capture_running = capture_spoilt = false;
    capture_mode = GLOBAL_MODE; /* of the calling thread: a test may have been one of fskv's own */
    for (int d = 0; d < NUM_DEVICES; d++) {
        devices[d].limit = REGION;
        devices[d].lost = devices[d].retained = 0;
    }
    pthread_mutex_unlock(&mutex);
}

const char *sim_misuses(void) { return misuses; }

/* The `after`th call of this name from now on answers `code`, once. */
void sim_fail(const char *name, int after, int code)
{
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < 8; i++)
        if (plan[i].code == 0) {
            snprintf(plan[i].name, sizeof plan[i].name, "%s", name);
            plan[i].after = after;
            plan[i].code = code;
            break;
        }
    pthread_mutex_unlock(&mutex);
}

/* No more than so many units of a part are for what was launched; somebody else holds the others. */
void sim_leave(int device, Part part, int units)
{
    pthread_mutex_lock(&mutex);
    devices[device].left[part] = units < UNITS[part] ? units : UNITS[part];
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

/* Every call from now on answers `code`, and nothing that was launched runs any more. */
void sim_lose(int device, int code)
{
    pthread_mutex_lock(&mutex);
    devices[device].lost = code;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&mutex);
}

void sim_limit(int device, size_t nbytes)
{
    pthread_mutex_lock(&mutex);
    devices[device].limit = devices[device].live + nbytes;
    pthread_mutex_unlock(&mutex);
}

long sim_calls(const char *name)
{
    long calls = 0;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < 128; i++)
        if (strcmp(counts[i].name, name) == 0)
            calls = counts[i].calls;
    pthread_mutex_unlock(&mutex);
    return calls;
}

int sim_contexts(int device) { return devices[device].retained; }
size_t sim_live(int device) { return devices[device].live; }
int sim_spinning(void) { return num_spinning; }

size_t sim_registered(void)
{
    size_t nbytes = 0;
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < num_registered; i++)
        nbytes += registered[i].live ? registered[i].nbytes : 0;
    pthread_mutex_unlock(&mutex);
    return nbytes;
}

/* Whether anything that was launched has not run. */
int sim_busy(void)
{
    int busy = 0;
    pthread_mutex_lock(&mutex);
    for (Stream *s = streams; s != NULL; s = s->next)
        busy |= s->first != NULL;
    pthread_mutex_unlock(&mutex);
    return busy;
}

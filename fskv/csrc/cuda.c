#define _GNU_SOURCE
#include "cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* From the driver's API: what is constant since CUDA 10. */
enum {
    OUT_OF_MEMORY = 2,
    STREAM_NON_BLOCKING = 1,
    EVENT_BLOCKING_SYNC = 1,
    EVENT_DISABLE_TIMING = 2,
    HOST_REGISTER_PORTABLE = 1,
    CAPTURE_RELAXED = 2,
};

typedef uint64_t Address; /* CUdeviceptr */
typedef void *Handle;     /* CUcontext, CUstream, CUevent, CUmodule, CUfunction */

/* name of the field, symbol, arguments */
#define CALLS(X)                                                                                         \
    X(init, cuInit, (unsigned))                                                                          \
    X(device_get, cuDeviceGet, (int *, int))                                                             \
    X(retain, cuDevicePrimaryCtxRetain, (Handle *, int))                                                 \
    X(push, cuCtxPushCurrent_v2, (Handle))                                                               \
    X(pop, cuCtxPopCurrent_v2, (Handle *))                                                               \
    X(capture_mode, cuThreadExchangeStreamCaptureMode, (int *))                                          \
    X(stream_create, cuStreamCreate, (Handle *, unsigned))                                               \
    X(stream_wait, cuStreamSynchronize, (Handle))                                                        \
    X(stream_destroy, cuStreamDestroy_v2, (Handle))                                                      \
    X(event_create, cuEventCreate, (Handle *, unsigned))                                                 \
    X(event_record, cuEventRecord, (Handle, Handle))                                                     \
    X(event_wait, cuEventSynchronize, (Handle))                                                          \
    X(event_destroy, cuEventDestroy_v2, (Handle))                                                        \
    X(alloc, cuMemAlloc_v2, (Address *, size_t))                                                         \
    X(release, cuMemFree_v2, (Address))                                                                  \
    X(host_register, cuMemHostRegister_v2, (void *, size_t, unsigned))                                   \
    X(host_unregister, cuMemHostUnregister, (void *))                                                    \
    X(to_device, cuMemcpyHtoDAsync_v2, (Address, const void *, size_t, Handle))                          \
    X(to_host, cuMemcpyDtoHAsync_v2, (void *, Address, size_t, Handle))                                  \
    X(on_device, cuMemcpyDtoDAsync_v2, (Address, Address, size_t, Handle))                               \
    X(module_load, cuModuleLoadData, (Handle *, const void *))                                           \
    X(module_function, cuModuleGetFunction, (Handle *, Handle, const char *))                            \
    X(module_unload, cuModuleUnload, (Handle))                                                           \
    X(launch, cuLaunchKernel,                                                                            \
      (Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void **, void **))

typedef struct {
#define FIELD(field, symbol, arguments) int(*field) arguments;
    CALLS(FIELD)
#undef FIELD
} Driver;

/* The kernel's table: a program copies one of these. */
typedef struct {
    uint64_t source, target, nbytes;
} Piece;

enum {
    MAX_PIECES = 2048, /* of a launch; 48 KiB */
    PIECE_NBYTES = 8192,
    NUM_THREADS = 128, /* of a program, as in the kernel */
    MAX_TO_HOST = 2,   /* copies at once: the engine's own, of the tokens that it sampled, need the same engine */
};

/* The copy kernel. The driver compiles it when it is loaded, in milliseconds, for each device since sm_70: nothing of
 * CUDA is needed to build or to run it. Program `ctaid.x` copies the row of that number of the table: its 128 threads
 * take 16 bytes each in turn where source, target and length are multiples of 16, and single bytes otherwise. */
static const char KERNEL[] = "fskv_copy_pieces";
static const char PTX[] =
    ".version 6.4\n"
    ".target sm_70\n"
    ".address_size 64\n"
    ".visible .entry fskv_copy_pieces(.param .u64 table)\n"
    ".reqntid 128, 1, 1\n"
    "{\n"
    "    .reg .pred %done, %odd;\n"
    "    .reg .b32 %program, %thread;\n"
    "    .reg .b64 %row, %source, %target, %nbytes, %at, %from, %to, %low, %high;\n"
    "    .reg .b16 %byte;\n"
    "    ld.param.u64 %row, [table];\n"
    "    cvta.to.global.u64 %row, %row;\n"
    "    mov.u32 %program, %ctaid.x;\n"
    "    mul.wide.u32 %at, %program, 24;\n"
    "    add.s64 %row, %row, %at;\n"
    "    ld.global.u64 %source, [%row];\n"
    "    ld.global.u64 %target, [%row+8];\n"
    "    ld.global.u64 %nbytes, [%row+16];\n"
    "    mov.u32 %thread, %tid.x;\n"
    "    or.b64 %at, %source, %target;\n"
    "    or.b64 %at, %at, %nbytes;\n"
    "    and.b64 %at, %at, 15;\n"
    "    setp.ne.u64 %odd, %at, 0;\n"
    "    @%odd bra BYTES;\n"
    "    mul.wide.u32 %at, %thread, 16;\n"
    "WORDS:\n"
    "    setp.ge.u64 %done, %at, %nbytes;\n"
    "    @%done bra DONE;\n"
    "    add.s64 %from, %source, %at;\n"
    "    add.s64 %to, %target, %at;\n"
    "    ld.global.v2.u64 {%low, %high}, [%from];\n"
    "    st.global.v2.u64 [%to], {%low, %high};\n"
    "    add.s64 %at, %at, 2048;\n"
    "    bra WORDS;\n"
    "BYTES:\n"
    "    cvt.u64.u32 %at, %thread;\n"
    "ONE:\n"
    "    setp.ge.u64 %done, %at, %nbytes;\n"
    "    @%done bra DONE;\n"
    "    add.s64 %from, %source, %at;\n"
    "    add.s64 %to, %target, %at;\n"
    "    ld.global.u8 %byte, [%from];\n"
    "    st.global.u8 [%to], %byte;\n"
    "    add.s64 %at, %at, 128;\n"
    "    bra ONE;\n"
    "DONE:\n"
    "    ret;\n"
    "}\n";

typedef struct Lane {
    struct Lane *next;
    Handle stream, event;
    Piece *table;         /* registered host memory */
    Address device_table; /* 0: no kernel */
    Address bounce;       /* laid out like the slot; 0: none */
} Lane;

struct Cuda {
    Driver driver;
    CudaOptions options;
    Handle context, module, function; /* function NULL: no kernel */
    Piece *tables;
    size_t tables_nbytes;
    Lane *lanes; /* all of them, in an array */
    int num_lanes;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    Lane *free;
    int num_used, num_broken, num_to_host;
    bool closed;
};

static bool failed(CudaError *error, const char *call, int code)
{
    *error = (CudaError){call, code};
    return false;
}

static const struct {
#define FIELD(field, symbol, arguments) const char *field;
    CALLS(FIELD)
#undef FIELD
} NAMES = {
#define NAME(field, symbol, arguments) .field = #symbol,
    CALLS(NAME)
#undef NAME
};

/* Whether a call of the driver's went well; says which one did not. */
#define OK(field, ...)                                                                                   \
    ((code = cuda->driver.field(__VA_ARGS__)) == 0 || failed(error, NAMES.field, code))

/* --- the calling thread --------------------------------------------------------------------- */

/* Make the device's context the thread's. Relaxed: the engine may capture a graph meanwhile, and a wait or an
 * allocation of ours must not spoil it. */
static bool enter(Cuda *cuda, int *mode, CudaError *error)
{
    int code;
    if (!OK(push, cuda->context))
        return false;
    *mode = CAPTURE_RELAXED;
    (void)cuda->driver.capture_mode(mode);
    return true;
}

static void leave(Cuda *cuda, int mode)
{
    Handle popped;
    (void)cuda->driver.capture_mode(&mode);
    (void)cuda->driver.pop(&popped);
}

/* --- lanes ------------------------------------------------------------------------------------ */

/* A wait is for copies of other threads, never for a disk. NULL: none will be free any more. */
static Lane *take_lane(Cuda *cuda, bool to_host)
{
    pthread_mutex_lock(&cuda->mutex);
    while ((cuda->free == NULL || (to_host && cuda->num_to_host >= MAX_TO_HOST)) && !cuda->closed &&
           cuda->num_broken < cuda->num_lanes)
        pthread_cond_wait(&cuda->changed, &cuda->mutex);
    Lane *lane = cuda->closed ? NULL : cuda->free;
    if (lane != NULL) {
        cuda->free = lane->next;
        cuda->num_used++;
        cuda->num_to_host += to_host;
    }
    pthread_mutex_unlock(&cuda->mutex);
    return lane;
}

static void give_back_lane(Cuda *cuda, Lane *lane, bool to_host, bool broken)
{
    pthread_mutex_lock(&cuda->mutex);
    cuda->num_used--;
    cuda->num_to_host -= to_host;
    if (broken) {
        cuda->num_broken++;
    } else {
        lane->next = cuda->free;
        cuda->free = lane;
    }
    pthread_cond_broadcast(&cuda->changed);
    pthread_mutex_unlock(&cuda->mutex);
}

static bool make_lane(Cuda *cuda, Lane *lane, Piece *table, CudaError *error)
{
    int code;
    lane->table = table;
    if (!OK(stream_create, &lane->stream, STREAM_NON_BLOCKING) ||
        !OK(event_create, &lane->event, EVENT_BLOCKING_SYNC | EVENT_DISABLE_TIMING))
        return false;
    if (cuda->function == NULL)
        return true;
    size_t table_nbytes = MAX_PIECES * sizeof(Piece);
    if (!OK(alloc, &lane->device_table, table_nbytes + cuda->options.bounce_nbytes))
        return false;
    if (cuda->options.bounce_nbytes > 0)
        lane->bounce = lane->device_table + table_nbytes;
    return true;
}

static void drop_lane(Cuda *cuda, Lane *lane)
{
    if (lane->device_table)
        (void)cuda->driver.release(lane->device_table);
    if (lane->event)
        (void)cuda->driver.event_destroy(lane->event);
    if (lane->stream)
        (void)cuda->driver.stream_destroy(lane->stream);
    memset(lane, 0, sizeof *lane);
}

/* Without memory for a buffer on the device: fewer lanes, or one by one. */
static bool make_lanes(Cuda *cuda, CudaError *error)
{
    for (int i = 0; i < cuda->options.num_lanes; i++) {
        Lane *lane = &cuda->lanes[i];
        Piece *table = cuda->tables + (size_t)i * MAX_PIECES;
        if (!make_lane(cuda, lane, table, error)) {
            drop_lane(cuda, lane);
            if (error->code != OUT_OF_MEMORY)
                return false;
            if (i > 0)
                break;
            cuda->function = NULL;
            if (!make_lane(cuda, lane, table, error)) {
                drop_lane(cuda, lane);
                return false;
            }
        }
        lane->next = cuda->free;
        cuda->free = lane;
        cuda->num_lanes = i + 1;
    }
    return true;
}

/* --- one copy --------------------------------------------------------------------------------- */

/* Nothing of the lane's runs afterwards. Where neither wait succeeds the context is lost, and with it all that ran. */
static bool wait_for(Cuda *cuda, Lane *lane, bool *broken, CudaError *error)
{
    int code;
    if (OK(event_record, lane->event, lane->stream) && OK(event_wait, lane->event))
        return true;
    /* The event may be what failed. */
    *broken = cuda->driver.stream_wait(lane->stream) != 0;
    return false;
}

static bool launch(Cuda *cuda, Lane *lane, unsigned num_pieces, CudaError *error)
{
    int code;
    void *arguments[] = {&lane->device_table};
    return OK(to_device, lane->device_table, lane->table, num_pieces * sizeof(Piece), lane->stream) &&
           OK(launch, cuda->function, num_pieces, 1, 1, NUM_THREADS, 1, 1, 0, lane->stream, arguments, NULL);
}

/* Between pages and a slot, or a lane's buffer, on the device. */
static bool run_kernel(Cuda *cuda, Lane *lane, const uint64_t *tensors, const int64_t *spans,
                       const int64_t *end, Address slot, bool to_slot, bool *broken, CudaError *error)
{
    unsigned num_pieces = 0;
    for (const int64_t *row = spans; row < end; row += 4) {
        uint64_t page = tensors[row[0]] + (uint64_t)row[1], place = slot + (uint64_t)row[2];
        uint64_t left = (uint64_t)row[3];
        while (left > 0) {
            uint64_t nbytes = left < PIECE_NBYTES ? left : PIECE_NBYTES;
            if (num_pieces == MAX_PIECES) {
                /* The table is in use until its copy is over. */
                if (!launch(cuda, lane, num_pieces, error) || !wait_for(cuda, lane, broken, error))
                    return false;
                num_pieces = 0;
            }
            lane->table[num_pieces++] = to_slot ? (Piece){page, place, nbytes} : (Piece){place, page, nbytes};
            page += nbytes;
            place += nbytes;
            left -= nbytes;
        }
    }
    return num_pieces == 0 || launch(cuda, lane, num_pieces, error);
}

static bool copy_at_once(Cuda *cuda, Lane *lane, const uint64_t *tensors, const int64_t *spans,
                         const int64_t *end, uint8_t *slot, size_t start, size_t stop, bool to_slot,
                         bool *broken, CudaError *error)
{
    int code;
    if (!to_slot && !OK(to_device, lane->bounce + start, slot + start, stop - start, lane->stream))
        return false;
    if (!run_kernel(cuda, lane, tensors, spans, end, lane->bounce, to_slot, broken, error))
        return false;
    return !to_slot || OK(to_host, slot + start, lane->bounce + start, stop - start, lane->stream);
}

/* Without a kernel, or where there is only one span. */
static bool copy_one_by_one(Cuda *cuda, Lane *lane, const uint64_t *tensors, const int64_t *spans,
                            const int64_t *end, const Slot *slot, bool to_slot, CudaError *error)
{
    int code;
    for (const int64_t *row = spans; row < end; row += 4) {
        Address page = tensors[row[0]] + (Address)row[1], there = slot->address + (Address)row[2];
        uint8_t *here = slot->memory + row[2];
        size_t nbytes = (size_t)row[3];
        if (nbytes == 0)
            continue;
        bool good;
        if (slot->address != 0)
            good = OK(on_device, to_slot ? there : page, to_slot ? page : there, nbytes, lane->stream);
        else
            good = to_slot ? OK(to_host, here, page, nbytes, lane->stream)
                           : OK(to_device, page, here, nbytes, lane->stream);
        if (!good)
            return false;
    }
    return true;
}

/* Where in the slot the spans begin and end, and whether all between is theirs: else the buffer would bring what it
 * held before. */
static bool without_holes(const int64_t *spans, const int64_t *end, size_t *start, size_t *stop)
{
    size_t sum = 0;
    *start = SIZE_MAX;
    *stop = 0;
    for (const int64_t *row = spans; row < end; row += 4) {
        size_t from = (size_t)row[2], nbytes = (size_t)row[3];
        *start = from < *start ? from : *start;
        *stop = from + nbytes > *stop ? from + nbytes : *stop;
        sum += nbytes;
    }
    return sum == *stop - *start && sum > 0;
}

bool cuda_copy_spans(Cuda *cuda, const uint64_t *tensors, const int64_t *spans, size_t num_spans, const Slot *slot,
                     bool to_slot, CudaError *error)
{
    const int64_t *end = spans + 4 * num_spans;
    size_t start, stop;
    int mode;
    bool broken = false, good, to_host = to_slot && slot->address == 0;
    if (num_spans == 0)
        return true;
    if (!enter(cuda, &mode, error))
        return false;
    Lane *lane = take_lane(cuda, to_host);
    if (lane == NULL) {
        leave(cuda, mode);
        return failed(error, "the device was given up", 0);
    }
    if (slot->address != 0 && lane->device_table != 0)
        good = run_kernel(cuda, lane, tensors, spans, end, slot->address, to_slot, &broken, error);
    else if (lane->bounce != 0 && num_spans > 1 && without_holes(spans, end, &start, &stop) &&
             stop <= cuda->options.bounce_nbytes)
        good = copy_at_once(cuda, lane, tensors, spans, end, slot->memory, start, stop, to_slot, &broken, error);
    else
        good = copy_one_by_one(cuda, lane, tensors, spans, end, slot, to_slot, error);
    /* Also after an error: what was launched before it still runs. */
    CudaError last;
    if (!wait_for(cuda, lane, &broken, good ? error : &last))
        good = false;
    give_back_lane(cuda, lane, to_host, broken);
    leave(cuda, mode);
    return good;
}

/* --- the device --------------------------------------------------------------------------------- */

bool cuda_uses_kernel(const Cuda *cuda) { return cuda->function != NULL; }

int cuda_num_lanes(const Cuda *cuda) { return cuda->num_lanes; }

bool cuda_register(Cuda *cuda, void *memory, size_t nbytes, CudaError *error)
{
    int code, mode;
    if (!enter(cuda, &mode, error))
        return false;
    bool good = OK(host_register, memory, nbytes, HOST_REGISTER_PORTABLE);
    leave(cuda, mode);
    return good;
}

void cuda_unregister(Cuda *cuda, void *memory)
{
    int mode;
    CudaError unused;
    if (enter(cuda, &mode, &unused)) {
        (void)cuda->driver.host_unregister(memory);
        leave(cuda, mode);
    }
}

bool cuda_allocate(Cuda *cuda, size_t nbytes, uint64_t *address, CudaError *error)
{
    int code, mode;
    if (!enter(cuda, &mode, error))
        return false;
    bool good = OK(alloc, address, nbytes);
    leave(cuda, mode);
    return good;
}

void cuda_release(Cuda *cuda, uint64_t address)
{
    int mode;
    CudaError unused;
    if (enter(cuda, &mode, &unused)) {
        (void)cuda->driver.release(address);
        leave(cuda, mode);
    }
}

static bool open_driver(Driver *driver, const char *library, CudaError *error)
{
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL); /* for the life of the process */
    if (opened == NULL)
        return failed(error, "libcuda cannot be opened", 0);
#define LOOK_UP(field, symbol, arguments)                                                                \
    if ((driver->field = (int(*) arguments)dlsym(opened, #symbol)) == NULL)                              \
        return failed(error, "libcuda has no " #symbol, 0);
    CALLS(LOOK_UP)
#undef LOOK_UP
    return true;
}

static bool prepare(Cuda *cuda, CudaError *error)
{
    int code;
    CudaOptions *options = &cuda->options;
    /* A driver without a compiler for PTX copies the spans one by one. */
    if (cuda->driver.module_load(&cuda->module, PTX) != 0)
        cuda->module = NULL;
    else if (cuda->driver.module_function(&cuda->function, cuda->module, KERNEL) != 0)
        cuda->function = NULL;
    cuda->lanes = calloc((size_t)options->num_lanes, sizeof *cuda->lanes);
    cuda->tables_nbytes = (size_t)options->num_lanes * MAX_PIECES * sizeof(Piece);
    void *tables = mmap(NULL, cuda->tables_nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (tables == MAP_FAILED || cuda->lanes == NULL) {
        if (tables != MAP_FAILED)
            munmap(tables, cuda->tables_nbytes);
        return failed(error, "no memory", 0);
    }
    (void)madvise(tables, cuda->tables_nbytes, MADV_DONTFORK);
    if (!OK(host_register, tables, cuda->tables_nbytes, HOST_REGISTER_PORTABLE)) {
        munmap(tables, cuda->tables_nbytes);
        return false;
    }
    cuda->tables = tables;
    return make_lanes(cuda, error);
}

Cuda *cuda_open(const CudaOptions *options, CudaError *error)
{
    int code, device, mode;
    Cuda *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) {
        failed(error, "no memory", 0);
        return NULL;
    }
    pthread_mutex_init(&cuda->mutex, NULL);
    pthread_cond_init(&cuda->changed, NULL);
    cuda->options = *options;
    bool good = false;
    if (options->num_lanes < 1)
        failed(error, "no lane", 0);
    /* The primary context is the one that torch uses. Retained for the life of the process. */
    else if (open_driver(&cuda->driver, options->library, error) && OK(init, 0) &&
             OK(device_get, &device, options->device_idx) && OK(retain, &cuda->context, device) &&
             enter(cuda, &mode, error)) {
        good = prepare(cuda, error);
        leave(cuda, mode);
        if (!good)
            cuda_close(cuda);
    }
    if (!good) {
        cuda_free(cuda);
        return NULL;
    }
    return cuda;
}

void cuda_close(Cuda *cuda)
{
    int mode;
    CudaError unused;
    pthread_mutex_lock(&cuda->mutex);
    bool again = cuda->closed;
    cuda->closed = true;
    pthread_cond_broadcast(&cuda->changed);
    while (cuda->num_used > 0)
        pthread_cond_wait(&cuda->changed, &cuda->mutex);
    pthread_mutex_unlock(&cuda->mutex);
    if (again || !enter(cuda, &mode, &unused))
        return;
    /* A broken lane keeps all it has: nobody knows what of it is still in use. */
    for (Lane *lane = cuda->free, *next; lane != NULL; lane = next) {
        next = lane->next;
        drop_lane(cuda, lane);
    }
    cuda->free = NULL;
    if (cuda->num_broken == 0) {
        if (cuda->module != NULL)
            (void)cuda->driver.module_unload(cuda->module);
        if (cuda->tables != NULL && cuda->driver.host_unregister(cuda->tables) == 0)
            munmap(cuda->tables, cuda->tables_nbytes);
    }
    leave(cuda, mode);
}

void cuda_free(Cuda *cuda)
{
    pthread_mutex_destroy(&cuda->mutex);
    pthread_cond_destroy(&cuda->changed);
    free(cuda->lanes);
    free(cuda);
}

/* TEST STUB of libcuda.so.1, never part of the product: lets the real kvikio run where there is no GPU.
 *
 * Loaded RTLD_GLOBAL under the soname libcuda.so.1 before kvikio's first I/O. As it comes, there is no device and every
 * call that matters answers CUDA_ERROR_NOT_INITIALIZED: kvikio then takes every pointer for host memory. A test may
 * declare ranges of its own host memory to be "device memory" (fskv_stub_device); then there is one device with one
 * context, and kvikio's compat path with its bounce buffers copies from and to them, byte by byte, by memcpy. It
 * shows what kvikio does with bytes and errors; it shows nothing about a GPU, its ordering or its speed.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_CONTEXT = 1, ATTRIBUTE_MEMORY_TYPE = 2, ATTRIBUTE_DEVICE_POINTER = 3, ATTRIBUTE_DEVICE_ORDINAL = 9 };
enum { MEMORY_TYPE_DEVICE = 2 };
#define MAX_RANGES 64

static struct { uintptr_t start, stop; } ranges[MAX_RANGES];
static _Atomic int num_ranges;
static _Atomic long num_copies, failing_copies; /* of copies from or to "device memory" */
static char context, stream;                    /* their addresses are the handles */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread void *current;

/* --- for the test ----------------------------------------------------------------------------------------- */

int fskv_stub_device(uintptr_t start, size_t nbytes)
{
    pthread_mutex_lock(&lock);
    int at = num_ranges < MAX_RANGES ? num_ranges : -1;
    if (at >= 0) {
        ranges[at].start = start;
        ranges[at].stop = start + nbytes;
        num_ranges++;
    }
    pthread_mutex_unlock(&lock);
    return at;
}
long fskv_stub_num_copies(void) { return num_copies; }
/* The next `num` copies answer `CUDA_ERROR_LAUNCH_FAILED` (719). */
void fskv_stub_fail_copies(long num) { failing_copies = num; }

/* --- what kvikio looks up --------------------------------------------------------------------------------- */

static int range_of(uintptr_t pointer)
{
    for (int i = 0; i < num_ranges; i++)
        if (ranges[i].start <= pointer && pointer < ranges[i].stop)
            return i;
    return -1;
}

static int needs_device(void) { return num_ranges ? SUCCESS : NOT_INITIALIZED; }

static int copy(void *to, const void *from, size_t nbytes)
{
    if (!num_ranges)
        return NOT_INITIALIZED;
    if (failing_copies > 0 && atomic_fetch_sub(&failing_copies, 1) > 0)
        return 719;
    memcpy(to, from, nbytes);
    num_copies++;
    return SUCCESS;
}

int cuInit(unsigned flags) { (void)flags; return needs_device(); }
int cuDriverGetVersion(int *version) { *version = 12040; return SUCCESS; } /* before cuMemcpyBatchAsync (12.8) */
int cuDeviceGetCount(int *count) { *count = num_ranges ? 1 : 0; return needs_device(); }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return needs_device(); }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{
    (void)attribute, (void)device;
    *value = 0;
    return needs_device();
}
int cuDevicePrimaryCtxRetain(void **ctx, int device) { (void)device; *ctx = &context; return needs_device(); }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; return needs_device(); }

int cuPointerGetAttribute(void *value, int attribute, uintptr_t pointer)
{
    if (!num_ranges)
        return NOT_INITIALIZED;
    if (range_of(pointer) < 0)
        return INVALID_VALUE; /* memory that CUDA does not know */
    switch (attribute) {
    case ATTRIBUTE_CONTEXT: *(void **)value = &context; return SUCCESS;
    case ATTRIBUTE_MEMORY_TYPE: *(unsigned *)value = MEMORY_TYPE_DEVICE; return SUCCESS;
    case ATTRIBUTE_DEVICE_POINTER: *(uintptr_t *)value = pointer; return SUCCESS;
    case ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = 0; return SUCCESS;
    default: return NOT_SUPPORTED;
    }
}
/* Unlike the one above, no error for memory that CUDA does not know: the values are zero. */
int cuPointerGetAttributes(unsigned num, int *attributes, void **values, uintptr_t pointer)
{
    if (!num_ranges)
        return NOT_INITIALIZED;
    for (unsigned i = 0; i < num; i++)
        if (cuPointerGetAttribute(values[i], attributes[i], pointer))
            memset(values[i], 0, attributes[i] == ATTRIBUTE_CONTEXT || attributes[i] == ATTRIBUTE_DEVICE_POINTER ? 8 : 4);
    return SUCCESS;
}
int cuMemGetAddressRange_v2(uintptr_t *base, size_t *nbytes, uintptr_t pointer)
{
    int at = num_ranges ? range_of(pointer) : -1;
    if (at < 0)
        return num_ranges ? INVALID_VALUE : NOT_INITIALIZED;
    *base = ranges[at].start;
    *nbytes = ranges[at].stop - ranges[at].start;
    return SUCCESS;
}

int cuCtxCreate_v2(void **ctx, unsigned flags, int device)
{
    (void)flags, (void)device;
    *ctx = &context;
    return needs_device();
}
int cuCtxCreate_v3(void **ctx, void *affinity, int num, unsigned flags, int device)
{
    (void)affinity, (void)num;
    return cuCtxCreate_v2(ctx, flags, device);
}
int cuCtxDestroy_v2(void *ctx) { (void)ctx; return needs_device(); }
int cuCtxGetCurrent(void **ctx) { *ctx = current; return needs_device(); }
int cuCtxGetDevice(int *device) { *device = 0; return needs_device(); }
int cuCtxPushCurrent_v2(void *ctx) { current = ctx; return needs_device(); }
int cuCtxPopCurrent_v2(void **ctx)
{
    if (ctx)
        *ctx = current;
    current = NULL;
    return needs_device();
}

int cuThreadExchangeStreamCaptureMode(int *mode) { (void)mode; return needs_device(); }
int cuMemHostAlloc(void **pointer, size_t nbytes, unsigned flags)
{
    (void)flags;
    if (!num_ranges)
        return NOT_INITIALIZED;
    return posix_memalign(pointer, 4096, nbytes) ? 2 : SUCCESS;
}
int cuMemFreeHost(void *pointer) { free(pointer); return SUCCESS; }
int cuMemHostRegister_v2(void *pointer, size_t nbytes, unsigned flags)
{
    (void)pointer, (void)nbytes, (void)flags;
    return needs_device();
}
int cuMemHostUnregister(void *pointer) { (void)pointer; return needs_device(); }
int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t n, void *s) { (void)s; return copy((void *)to, from, n); }
int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t n, void *s) { (void)s; return copy(to, (void *)from, n); }
int cuMemcpyAsync(uintptr_t to, uintptr_t from, size_t n, void *s) { (void)s; return copy((void *)to, (void *)from, n); }

int cuStreamCreate(void **made, unsigned flags) { (void)flags; *made = &stream; return needs_device(); }
int cuStreamDestroy_v2(void *s) { (void)s; return needs_device(); }
int cuStreamSynchronize(void *s) { (void)s; return needs_device(); }
int cuEventCreate(void **event, unsigned flags) { (void)flags; *event = &stream; return needs_device(); }
int cuEventDestroy_v2(void *event) { (void)event; return needs_device(); }
int cuEventRecord(void *event, void *s) { (void)event, (void)s; return needs_device(); }
int cuEventQuery(void *event) { (void)event; return needs_device(); }
int cuEventSynchronize(void *event) { (void)event; return needs_device(); }
int cuLaunchHostFunc(void *s, void (*function)(void *), void *data) { (void)s; function(data); return needs_device(); }

int cuGetErrorName(int error, const char **name)
{
    *name = error == NOT_INITIALIZED ? "CUDA_ERROR_NOT_INITIALIZED" : error == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
          : error == INVALID_VALUE   ? "CUDA_ERROR_INVALID_VALUE"   : "CUDA_ERROR";
    return SUCCESS;
}
int cuGetErrorString(int error, const char **text) { *text = error == 719 ? "stub: launch failed" : "stub"; return SUCCESS; }

/* The way between KV pages on a CUDA device and slots in host memory. Knows nothing of Python: called without the
 * interpreter's lock. The driver is opened at run time; nothing of CUDA is needed to build this.
 *
 * Each copy has a lane for itself: a stream that waits for no other, an event, a table, a buffer on the device. When a
 * copy returns, also when it failed, nothing of it runs any more: pages and slot are the caller's again. The calling
 * thread has the context afterwards that it had before.
 */
#ifndef FSKV_CUDA_H
#define FSKV_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct Cuda Cuda;

typedef struct {
    const char *library; /* what to open: libcuda.so.1 */
    int device_idx;
    size_t bounce_nbytes; /* of a lane's buffer on the device: a slot; 0 where slots are on the device */
    int num_lanes;
} CudaOptions;

/* A staging slot: in host memory, or at an address on the device. */
typedef struct {
    uint8_t *memory;
    uint64_t address; /* 0: in host memory */
} Slot;

/* The driver's call that failed, or a sentence with code 0. */
typedef struct {
    const char *call;
    int code;
} CudaError;

Cuda *cuda_open(const CudaOptions *options, CudaError *error);

/* Waits for copies that are under way, refuses others, gives back what the device has for us. Once. */
void cuda_close(Cuda *cuda);

/* After cuda_close, and when nobody will call any more. */
void cuda_free(Cuda *cuda);

/* Whether a chunk crosses the bus in one copy. */
bool cuda_uses_kernel(const Cuda *cuda);
int cuda_num_lanes(const Cuda *cuda);

/* Host memory that copies may use from now on. */
bool cuda_register(Cuda *cuda, void *memory, size_t nbytes, CudaError *error);
void cuda_unregister(Cuda *cuda, void *memory);

/* Memory on the device, for slots and for a trial at start-up. */
bool cuda_allocate(Cuda *cuda, size_t nbytes, uint64_t *address, CudaError *error);
void cuda_release(Cuda *cuda, uint64_t address);

/* Copy all spans, rows of (tensor, offset in it, offset in the slot, bytes) that the caller has checked. `tensors` are
 * addresses on the device. False: the error says what failed, and how much was copied nobody knows. */
bool cuda_copy_spans(Cuda *cuda, const uint64_t *tensors, const int64_t *spans, size_t num_spans, const Slot *slot,
                     bool to_slot, CudaError *error);

#endif

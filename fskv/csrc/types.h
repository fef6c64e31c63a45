/* The Python types of fskv._native and who may touch their fields.
 *
 * Guard and Queue have a mutex each; what it guards is said at the field; a queue's is taken before a guard's. Nobody takes a Python lock, or the
 * interpreter's, while holding one of them, and nobody holds one across a system call on a file.
 */
#ifndef FSKV_TYPES_H
#define FSKV_TYPES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdbool.h>

#include "chunk_io.h"
#include "cuda.h"

/* A CUDA device, and what is registered with it. */
typedef struct {
    PyObject_HEAD
    Cuda *cuda;
    Py_buffer *registered; /* guarded by the interpreter, as the next two */
    Py_ssize_t num_registered;
    bool closed;
} Device;

/* The engine's KV tensors, as flat bytes. Constant. */
typedef struct {
    PyObject_HEAD
    Py_buffer *buffers; /* on a device: without an object, `buf` is no address of the host's */
    Py_ssize_t num_buffers;
    Device *device; /* NULL: in host memory */
    uint64_t *addresses; /* those of a device, once more */
} Pages;

/* May the KV pages of a job still be touched? */
typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex; /* guards the two below */
    pthread_cond_t left;
    bool abandoned;
    int num_inside;
} Guard;

/* What all chunk files of a group have in common. Constant. */
typedef struct {
    PyObject_HEAD
    FileLayout file;
    PyObject *head, *middle, *rows, *tail; /* bytes, which `file` points into */
} Layout;

typedef enum { NEW, QUEUED, RUNNING, PARKED, DONE } State;

/* One chunk on its way between KV pages and a file. */
typedef struct Transfer {
    PyObject_HEAD
    /* constant once made */
    PyObject *owner;
    Layout *layout; /* NULL: nothing is done here, every step is Python's */
    Pages *pages;   /* NULL: Python moves the KV */
    Guard *guard;
    PyObject *path, *part, *key; /* bytes */
    Py_buffer spans;
    ChunkFile file;
    bool is_load;
    /* of the thread that runs it; before that, of whoever submits it */
    Py_buffer slot; /* buf != NULL: its own; the pages of a store were gathered into it ahead */
    bool read;      /* load: the slot holds what is wanted, checked, and it was parked */
    bool gathered;  /* store: the slot holds the pages */
    bool digested;  /* store: and the digests of its rows */
    bool tried;     /* store: chunk_write was called */
    bool checked;   /* load: the slot holds what is wanted, checked; Python goes on */
    bool old_mtime; /* and the file wants to be touched */
    /* guarded by the queue's mutex */
    struct Transfer *previous, *next;
    const void *queue; /* the one it was pushed to */
    State state;
    bool written_off;
    bool held;         /* load: its pages are in use by others; once it was read it is parked */
    bool lost;         /* nobody can tell whether they still are */
    double started_at; /* CLOCK_MONOTONIC seconds; 0 before */
    double began_at;   /* the same, when it was read; 0: it was never parked */
    int spare_refs;    /* references that the queue holds for events to come */
} Transfer;

extern PyTypeObject DeviceType, PagesType, GuardType, LayoutType, TransferType, QueueType;

bool guard_enter(Guard *guard);
void guard_leave(Guard *guard);
bool guard_abandoned(Guard *guard);

/* Check every span of a buffer of int64 (n, 4) against the tensors and the slot; sets ValueError. */
bool spans_fit(const Pages *pages, const Py_buffer *spans, size_t base, size_t slot_nbytes);
void copy_init(void);
/* False only for pages on a device. It is over when it returns, also then. */
bool copy_spans(const Pages *pages, const Py_buffer *spans, uint8_t *slot_base, bool to_slot,
                CudaError *error);
/* Gather a store's pages into its slot; those of the host with the digest of each row, while it is in the cache. */
bool gather(Transfer *transfer, uint8_t *slot);
PyObject *set_cuda_error(const CudaError *error);
/* The memory of a HostSlot, which is its `array`. */
int slot_buffer(PyObject *slot, Py_buffer *view);
double monotonic_s(void);

#endif

/* The Python types of fskv._native and who may touch their fields.
 *
 * Guard and Queue have a mutex each; what it guards is said at the field. Nobody holds two of them, takes a Python lock
 * or the interpreter's while holding one, or holds one across a system call on a file.
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

/* Page i of block b has `nbytes` at `offset` + b * `stride` of its tensor. */
typedef struct {
    int64_t tensor, offset, stride, nbytes;
} Place;

/* Where the pages of a group's blocks are. Constant. */
typedef struct {
    PyObject_HEAD
    Pages *pages;
    Place *places; /* of one block, in the payload's order */
    Py_ssize_t num_places;
    size_t block_nbytes;
} Placement;

/* Blocks of a chunk by the engine's numbers; all of them lie `base` bytes further on. */
typedef struct {
    int64_t *ids;
    uint32_t num;
    int64_t base;
} Blocks;

/* Contiguous bytes on both sides: a row of fskv.format.spans.SpanTable. */
typedef struct {
    int64_t tensor, in_tensor, in_payload, nbytes;
} Span;

typedef struct {
    Span *first;
    size_t num;
} Spans;

/* The gate before a job's KV pages. It is shut while the device still uses them, and abandoned when the job was
 * given up. */
typedef enum { SHUT, OPEN, ABANDONED } Gate;

typedef struct {
    PyObject_HEAD
    pthread_mutex_t mutex; /* guards the two below */
    pthread_cond_t changed;
    Gate gate;
    int num_inside;
} Guard;

/* What all chunk files of a group have in common. Constant. */
typedef struct {
    PyObject_HEAD
    FileLayout file;
    PyObject *args, *kwargs; /* with the bytes that `file` points into */
} Layout;

/* Where a chunk is on its way; fskv.data_path.job.State is the same.
 *
 *     store   NEW (-> PARKED) -> QUEUED -> GATHERING -> WRITING -> DONE
 *     load    NEW (-> PARKED) -> QUEUED -> READING (-> WAITING) -> SCATTERING -> WRITING (its mtime) -> DONE
 *
 * A store is parked until its pages are complete. A load that was read and checked waits for its job's gate, and
 * its thread with it; a load is parked when there are too many of these. A thread that meets what is not done here
 * hands the transfer to Python as it stands. */
typedef enum { NEW, PARKED, QUEUED, GATHERING, WRITING, READING, WAITING, SCATTERING, DONE } State;

/* One chunk on its way between KV pages and a file. */
typedef struct Transfer {
    PyObject_HEAD
    /* constant once made */
    PyObject *owner;
    Guard *guard;
    Layout *layout; /* NULL, as all that follows: every step is Python's */
    Placement *placement;
    PyObject *key; /* bytes */
    PyObject *use; /* a bytearray that `file` points into, or None */
    char *paths;   /* which `file` points into */
    Blocks blocks;
    ChunkFile file;
    bool is_load;
    /* of whoever submits it, then of the thread that runs it */
    Py_buffer slot; /* buf != NULL: its own; the pages of a store were gathered into it before it was queued */
    bool old_mtime; /* load: its file wants to be touched */
    /* guarded by the queue's mutex */
    struct Transfer *previous, *next;
    const void *queue; /* the one it was pushed to */
    State state;
    bool counted;      /* it has one of the queue's places at the disk */
    bool written_off;  /* its thread counts as hung */
    double started_at; /* CLOCK_MONOTONIC seconds; 0 before */
    double at_disk_since; /* the same, and anew when its pages are free */
    double waited_s;   /* for the gate */
    int spare_refs;    /* references that the queue holds for events to come */
} Transfer;

extern PyTypeObject DeviceType, PagesType, PlacementType, GuardType, LayoutType, TransferType, QueueType;

/* Wait for the gate, and enter if it opens. */
bool guard_enter(Guard *guard);
void guard_leave(Guard *guard);
bool guard_shut(Guard *guard);

/* Check every span against the tensors and the slot; sets ValueError. */
bool spans_fit(const Pages *pages, const Spans *spans, size_t base, size_t slot_nbytes);
/* Whether all pages of the blocks are inside their tensors. */
bool blocks_fit(const Placement *placement, const Blocks *blocks);
void copy_init(void);
/* False only for pages on a device. It is over when it returns, also then. */
bool copy_spans(const Pages *pages, const Spans *spans, const Slot *slot, bool to_slot, CudaError *error);
/* Between a transfer's pages and its slot. False, and Python has to do it: no memory, or the device says no. */
bool gather(const Transfer *transfer, uint8_t *slot);
bool scatter(const Transfer *transfer, uint8_t *slot);
PyObject *set_cuda_error(const CudaError *error);
/* The memory of a HostSlot, which is its `array`. */
int slot_buffer(PyObject *slot, Py_buffer *view);
int64_t *use_stamp(PyObject *use);
double monotonic_s(void);

/* Functions of the module; fskv/_native.pyi has their types. */
PyObject *probe_chunks(PyObject *module, PyObject *args);
PyObject *stamp_file(PyObject *module, PyObject *args);

#endif

/* KV pages: the engine's memory, where a group's pages are in it, and copies between them and a slot. */
#include "types.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* --- Pages ------------------------------------------------------------------------------- */

static void Pages_dealloc(Pages *self)
{
    for (Py_ssize_t i = 0; i < self->num_buffers; i++)
        PyBuffer_Release(&self->buffers[i]);
    PyMem_Free(self->buffers);
    PyMem_Free(self->addresses);
    Py_XDECREF(self->device);
    Py_TYPE(self)->tp_free(self);
}

/* One tensor on a device, as (address, bytes). */
static bool add_address(Pages *self, PyObject *item)
{
    unsigned long long address;
    Py_ssize_t nbytes;
    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "Kn:Pages", &address, &nbytes))
        return false;
    if (nbytes < 0 || address > UINT64_MAX - (uint64_t)nbytes) {
        PyErr_SetString(PyExc_ValueError, "Pages: no such memory");
        return false;
    }
    self->addresses[self->num_buffers] = address;
    self->buffers[self->num_buffers].len = nbytes;
    return true;
}

static PyObject *Pages_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *tensors, *sequence, *device = NULL;
    if (!PyArg_ParseTuple(args, "O|O!:Pages", &tensors, &DeviceType, &device) ||
        (sequence = PySequence_Fast(tensors, "Pages takes a sequence of buffers")) == NULL)
        return NULL;
    Py_ssize_t n = PySequence_Fast_GET_SIZE(sequence);
    Pages *self = (Pages *)type->tp_alloc(type, 0);
    if (self != NULL && ((self->buffers = PyMem_Calloc((size_t)n + 1, sizeof(Py_buffer))) == NULL ||
                         (self->addresses = PyMem_Calloc((size_t)n + 1, sizeof(uint64_t))) == NULL)) {
        PyErr_NoMemory();
        Py_CLEAR(self);
    }
    if (self != NULL)
        self->device = (Device *)Py_XNewRef(device);
    for (Py_ssize_t i = 0; self != NULL && i < n; i++) {
        PyObject *item = PySequence_Fast_GET_ITEM(sequence, i);
        if (device != NULL ? !add_address(self, item)
                           : PyObject_GetBuffer(item, &self->buffers[i], PyBUF_WRITABLE) != 0)
            Py_CLEAR(self);
        else
            self->num_buffers++;
    }
    Py_DECREF(sequence);
    return (PyObject *)self;
}

/* --- Placement --------------------------------------------------------------------------- */

static void Placement_dealloc(Placement *self)
{
    Py_XDECREF(self->pages);
    PyMem_Free(self->places);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *Placement_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Pages *pages;
    PyObject *rows, *sequence;
    if (!PyArg_ParseTuple(args, "O!O:Placement", &PagesType, &pages, &rows) ||
        (sequence = PySequence_Tuple(rows)) == NULL)
        return NULL;
    Py_ssize_t n = PyTuple_GET_SIZE(sequence);
    Placement *self = (Placement *)type->tp_alloc(type, 0);
    if (self != NULL && (self->places = PyMem_Calloc((size_t)n + 1, sizeof(Place))) == NULL) {
        PyErr_NoMemory();
        Py_CLEAR(self);
    }
    if (self != NULL)
        self->pages = (Pages *)Py_NewRef(pages);
    for (Py_ssize_t i = 0; self != NULL && i < n; i++) {
        long long tensor, offset, stride, nbytes;
        PyObject *row = PyTuple_GET_ITEM(sequence, i);
        if (!PyTuple_Check(row)) {
            PyErr_SetString(PyExc_TypeError, "Placement: expected tuples of four");
            Py_CLEAR(self);
        } else if (!PyArg_ParseTuple(row, "LLLL:Placement", &tensor, &offset, &stride, &nbytes)) {
            Py_CLEAR(self);
        } else if (tensor < 0 || tensor >= pages->num_buffers || offset < 0 || stride < 0 || nbytes <= 0 ||
                   nbytes > pages->buffers[tensor].len || offset > pages->buffers[tensor].len - nbytes) {
            PyErr_SetString(PyExc_ValueError, "Placement: a page outside its tensor");
            Py_CLEAR(self);
        } else {
            self->places[self->num_places++] = (Place){tensor, offset, stride, nbytes};
            self->block_nbytes += (size_t)nbytes;
        }
    }
    Py_DECREF(sequence);
    return (PyObject *)self;
}

bool blocks_fit(const Placement *placement, const Blocks *blocks)
{
    int64_t highest = 0, begin, end;
    for (uint32_t i = 0; i < blocks->num; i++) {
        if (blocks->ids[i] < 0)
            return false;
        highest = blocks->ids[i] > highest ? blocks->ids[i] : highest;
    }
    for (const Place *place = placement->places; place < placement->places + placement->num_places; place++)
        if (__builtin_mul_overflow(highest, place->stride, &begin) ||
            __builtin_add_overflow(begin, blocks->base, &begin) ||
            __builtin_add_overflow(begin, place->offset + place->nbytes, &end) ||
            end > placement->pages->buffers[place->tensor].len)
            return false;
    return blocks->base >= 0;
}

/* fskv.format.spans.ChunkPlan.table is the same; NULL in `first` without memory. */
static Spans spans_of(const Placement *placement, const Blocks *blocks, uint32_t first_block)
{
    Spans spans = {malloc((size_t)blocks->num * (size_t)placement->num_places * sizeof(Span)), 0};
    int64_t in_payload = (int64_t)(first_block * placement->block_nbytes);
    for (uint32_t i = 0; spans.first != NULL && i < blocks->num; i++)
        for (Py_ssize_t k = 0; k < placement->num_places; k++) {
            const Place *place = &placement->places[k];
            int64_t in_tensor = blocks->base + place->offset + blocks->ids[i] * place->stride;
            Span *last = spans.first + spans.num - 1;
            if (spans.num > 0 && last->tensor == place->tensor && last->in_tensor + last->nbytes == in_tensor)
                last->nbytes += place->nbytes; /* neighbours on both sides */
            else
                spans.first[spans.num++] = (Span){place->tensor, in_tensor, in_payload, place->nbytes};
            in_payload += place->nbytes;
        }
    return spans;
}

/* --- copies ------------------------------------------------------------------------------ */

bool spans_fit(const Pages *pages, const Spans *spans, size_t base, size_t slot_nbytes)
{
    for (const Span *span = spans->first; span < spans->first + spans->num; span++)
        if (span->nbytes < 0 || span->in_tensor < 0 || span->in_payload < 0 || span->tensor < 0 ||
            span->tensor >= pages->num_buffers || span->nbytes > pages->buffers[span->tensor].len ||
            span->in_tensor > pages->buffers[span->tensor].len - span->nbytes ||
            (size_t)span->nbytes > slot_nbytes - base ||
            (size_t)span->in_payload > slot_nbytes - base - (size_t)span->nbytes) {
            PyErr_Format(PyExc_ValueError,
                         "span of %lld bytes at %lld of tensor %lld, payload offset %lld: outside",
                         (long long)span->nbytes, (long long)span->in_tensor, (long long)span->tensor,
                         (long long)span->in_payload);
            return false;
        }
    return true;
}

#if defined(__x86_64__)
/* Past the cache: a KV page is not read again by this thread, and reading it in order to overwrite it would
 * cost a third of the memory's bandwidth. Both ends 32-byte aligned, nbytes a multiple of 128. */
__attribute__((target("avx2"))) static void stream(uint8_t *to, const uint8_t *from, size_t nbytes)
{
    for (size_t at = 0; at < nbytes; at += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + at));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + at + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + at + 96));
        _mm256_stream_si256((__m256i *)(to + at), a);
        _mm256_stream_si256((__m256i *)(to + at + 32), b);
        _mm256_stream_si256((__m256i *)(to + at + 64), c);
        _mm256_stream_si256((__m256i *)(to + at + 96), d);
    }
}

static bool can_stream;
#endif

void copy_init(void)
{
#if defined(__x86_64__)
    can_stream = __builtin_cpu_supports("avx2");
#endif
}

static void copy_to_page(uint8_t *page, const uint8_t *place, size_t nbytes)
{
#if defined(__x86_64__)
    if (can_stream && nbytes % 128 == 0 && (uintptr_t)page % 32 == 0) {
        stream(page, place, nbytes);
        return;
    }
#endif
    memcpy(page, place, nbytes);
}

bool copy_spans(const Pages *pages, const Spans *spans, const Slot *slot, bool to_slot, CudaError *error)
{
    uint8_t *slot_base = slot->memory;
    if (pages->device != NULL)
        return cuda_copy_spans(pages->device->cuda, pages->addresses, &spans->first->tensor, spans->num, slot,
                               to_slot, error);
    for (const Span *span = spans->first; span < spans->first + spans->num; span++) {
        uint8_t *page = (uint8_t *)pages->buffers[span->tensor].buf + span->in_tensor;
        uint8_t *place = slot_base + span->in_payload;
        if (to_slot)
            memcpy(place, page, (size_t)span->nbytes);
        else
            copy_to_page(page, place, (size_t)span->nbytes);
    }
#if defined(__x86_64__)
    _mm_sfence(); /* streamed bytes are there before anybody is told */
#endif
    return true;
}

/* The pages of the host with the digest of each row, while it is in the cache. */
static void gather_and_digest(const Transfer *transfer, const Spans *spans, uint8_t *slot)
{
    const FileLayout *layout = &transfer->layout->file;
    uint8_t *payload = slot + layout->header_nbytes;
    uint8_t *digests = row_digests_in(layout, &transfer->file, slot);
    size_t digested = 0;
    memset(payload, 0, transfer->file.first_block * layout->block_nbytes);
    for (const Span *span = spans->first; span < spans->first + spans->num; span++) {
        memcpy(payload + span->in_payload,
               (uint8_t *)transfer->placement->pages->buffers[span->tensor].buf + span->in_tensor,
               (size_t)span->nbytes);
        /* Spans come in the payload's order: what is before this one's end will not change. */
        for (; digested + ROW <= (size_t)(span->in_payload + span->nbytes); digested += ROW)
            digest_rows(payload + digested, ROW, digests + digested / ROW * 8);
    }
    memset(payload + layout->content_nbytes, 0, layout->payload_nbytes - layout->content_nbytes);
    digest_rows(payload + digested, layout->payload_nbytes - digested, digests + digested / ROW * 8);
}

bool gather(const Transfer *transfer, uint8_t *slot)
{
    const Pages *pages = transfer->placement->pages;
    Spans spans = spans_of(transfer->placement, &transfer->blocks, transfer->file.first_block);
    Slot payload = {slot + transfer->layout->file.header_nbytes, 0};
    CudaError error;
    bool good = spans.first != NULL;
    if (good && pages->device == NULL && transfer->layout->file.sealed.keys == NULL)
        gather_and_digest(transfer, &spans, slot);
    else if (good)
        good = copy_spans(pages, &spans, &payload, true, &error);
    free(spans.first);
    return good;
}

bool scatter(const Transfer *transfer, uint8_t *slot)
{
    Spans spans = spans_of(transfer->placement, &transfer->blocks, transfer->file.first_block);
    Slot payload = {slot + transfer->layout->file.header_nbytes, 0};
    CudaError error;
    bool good = spans.first != NULL && copy_spans(transfer->placement->pages, &spans, &payload, false, &error);
    free(spans.first);
    return good;
}

PyTypeObject PagesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Pages",
    .tp_doc = "Pages(tensors, device=None): the KV tensors, each a writable buffer of flat bytes, or with a device "
              "(address, bytes).",
    .tp_basicsize = sizeof(Pages),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Pages_new,
    .tp_dealloc = (destructor)Pages_dealloc,
};

PyTypeObject PlacementType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Placement",
    .tp_doc = "Placement(pages, [(tensor, offset, stride, bytes)]): see fskv.format.spans.Placement.",
    .tp_basicsize = sizeof(Placement),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Placement_new,
    .tp_dealloc = (destructor)Placement_dealloc,
};

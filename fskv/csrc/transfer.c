#include "types.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <sys/stat.h>
#include <time.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

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

bool spans_fit(const Pages *pages, const Py_buffer *spans, size_t base, size_t slot_nbytes)
{
    const char *format = spans->format ? spans->format : "";
    if (spans->itemsize != 8 || spans->len % 32 != 0 || (strcmp(format, "l") && strcmp(format, "q"))) {
        PyErr_SetString(PyExc_ValueError, "spans: expected int64 of shape (n, 4)");
        return false;
    }
    const int64_t *row = spans->buf, *end = row + spans->len / 8;
    for (; row < end; row += 4) {
        int64_t tensor = row[0], in_tensor = row[1], in_payload = row[2], nbytes = row[3];
        if (nbytes < 0 || in_tensor < 0 || in_payload < 0 || tensor < 0 ||
            tensor >= pages->num_buffers || nbytes > pages->buffers[tensor].len ||
            in_tensor > pages->buffers[tensor].len - nbytes || (size_t)nbytes > slot_nbytes - base ||
            (size_t)in_payload > slot_nbytes - base - (size_t)nbytes) {
            PyErr_Format(PyExc_ValueError,
                         "span of %lld bytes at %lld of tensor %lld, payload offset %lld: outside",
                         (long long)nbytes, (long long)in_tensor, (long long)tensor,
                         (long long)in_payload);
            return false;
        }
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

bool copy_spans(const Pages *pages, const Py_buffer *spans, uint8_t *slot_base, bool to_slot,
                CudaError *error)
{
    const int64_t *row = spans->buf, *end = row + spans->len / 8;
    if (pages->device != NULL)
        return cuda_copy_spans(pages->device->cuda, pages->addresses, row, (size_t)spans->len / 32,
                               slot_base, to_slot, error);
    for (; row < end; row += 4) {
        uint8_t *page = (uint8_t *)pages->buffers[row[0]].buf + row[1], *place = slot_base + row[2];
        if (to_slot)
            memcpy(place, page, (size_t)row[3]);
        else
            copy_to_page(page, place, (size_t)row[3]);
    }
#if defined(__x86_64__)
    _mm_sfence(); /* streamed bytes are there before anybody is told */
#endif
    return true;
}

static void gather_and_digest(const Transfer *transfer, uint8_t *slot)
{
    const FileLayout *layout = &transfer->layout->file;
    uint8_t *payload = slot + layout->header_nbytes;
    uint8_t *digests = row_digests_in(layout, &transfer->file, slot);
    const int64_t *row = transfer->spans.buf, *end = row + transfer->spans.len / 8;
    size_t digested = 0;
    memset(payload, 0, transfer->file.first_block * layout->block_nbytes);
    for (; row < end; row += 4) {
        memcpy(payload + row[2], (uint8_t *)transfer->pages->buffers[row[0]].buf + row[1],
               (size_t)row[3]);
        /* Spans come in the payload's order: what is before this one's end will not change. */
        for (; digested + ROW <= (size_t)(row[2] + row[3]); digested += ROW)
            digest_rows(payload + digested, ROW, digests + digested / ROW * 8);
    }
    memset(payload + layout->content_nbytes, 0, layout->payload_nbytes - layout->content_nbytes);
    digest_rows(payload + digested, layout->payload_nbytes - digested, digests + digested / ROW * 8);
}

bool gather(Transfer *transfer, uint8_t *slot)
{
    CudaError error;
    if (transfer->pages->device == NULL)
        gather_and_digest(transfer, slot);
    else if (!copy_spans(transfer->pages, &transfer->spans, slot + transfer->layout->file.header_nbytes, true,
                         &error))
        return false;
    transfer->gathered = true;
    transfer->digested = transfer->pages->device == NULL;
    return true;
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

/* --- Guard ------------------------------------------------------------------------------- */

static PyObject *Guard_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    Guard *self = (Guard *)type->tp_alloc(type, 0);
    if (self != NULL) {
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->left, NULL);
    }
    return (PyObject *)self;
}

static void Guard_dealloc(Guard *self)
{
    pthread_mutex_destroy(&self->mutex);
    pthread_cond_destroy(&self->left);
    Py_TYPE(self)->tp_free(self);
}

bool guard_enter(Guard *guard)
{
    pthread_mutex_lock(&guard->mutex);
    bool allowed = !guard->abandoned;
    guard->num_inside += allowed;
    pthread_mutex_unlock(&guard->mutex);
    return allowed;
}

void guard_leave(Guard *guard)
{
    pthread_mutex_lock(&guard->mutex);
    guard->num_inside--;
    pthread_cond_broadcast(&guard->left);
    pthread_mutex_unlock(&guard->mutex);
}

static PyObject *Guard_enter(Guard *self, PyObject *unused)
{
    return PyBool_FromLong(guard_enter(self));
}

static PyObject *Guard_leave(Guard *self, PyObject *unused)
{
    guard_leave(self);
    Py_RETURN_NONE;
}

static PyObject *Guard_abandon(Guard *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->mutex);
    self->abandoned = true;
    while (self->num_inside > 0)
        pthread_cond_wait(&self->left, &self->mutex);
    pthread_mutex_unlock(&self->mutex);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

bool guard_abandoned(Guard *guard)
{
    pthread_mutex_lock(&guard->mutex);
    bool abandoned = guard->abandoned;
    pthread_mutex_unlock(&guard->mutex);
    return abandoned;
}

static PyObject *Guard_abandoned(Guard *self, void *unused)
{
    return PyBool_FromLong(guard_abandoned(self));
}

static PyMethodDef Guard_methods[] = {
    {"enter", (PyCFunction)Guard_enter, METH_NOARGS, "See fskv.data_path.threads.Guard."},
    {"leave", (PyCFunction)Guard_leave, METH_NOARGS, "See fskv.data_path.threads.Guard."},
    {"abandon", (PyCFunction)Guard_abandon, METH_NOARGS, "See fskv.data_path.threads.Guard."},
    {NULL},
};

static PyGetSetDef Guard_getset[] = {
    {"abandoned", (getter)Guard_abandoned, NULL, NULL, NULL},
    {NULL},
};

PyTypeObject GuardType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Guard",
    .tp_doc = "Guard(): may the KV pages of a job still be touched?",
    .tp_basicsize = sizeof(Guard),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Guard_new,
    .tp_dealloc = (destructor)Guard_dealloc,
    .tp_methods = Guard_methods,
    .tp_getset = Guard_getset,
};

/* --- Layout ------------------------------------------------------------------------------ */

static PyObject *Layout_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"head",          "middle",        "rows",         "tail",
                            "header_nbytes", "payload_nbytes", "content_nbytes", "block_nbytes",
                            "num_blocks",    "format_version", "open_flags",   "fsync",
                            "touch",         "file_mode",      "dir_mode",     "touch_interval_s",
                            "root_nbytes",   NULL};
    PyObject *head, *middle, *rows, *tail;
    FileLayout file = {0};
    Py_ssize_t header, payload, content, block, root_nbytes;
    unsigned int num_blocks, version, file_mode, dir_mode;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "SSSSnnnnIIippIIdn:Layout", names, &head, &middle,
                                     &rows, &tail, &header, &payload, &content, &block,
                                     &num_blocks, &version, &file.open_flags, &file.fsync,
                                     &file.touch, &file_mode, &dir_mode, &file.touch_interval_s,
                                     &root_nbytes))
        return NULL;
    /* The pieces, the longest key, both integers, the digests. */
    Py_ssize_t most = 32 + PyBytes_GET_SIZE(head) + PyBytes_GET_SIZE(middle) +
                      PyBytes_GET_SIZE(rows) + PyBytes_GET_SIZE(tail) + 2 + 255 + 5 + 9 +
                      8 * (Py_ssize_t)num_rows((size_t)(payload > 0 ? payload : 0));
    if (header <= 0 || header % 4096 || payload <= 0 || payload % 4096 || content <= 0 ||
        content > payload || block <= 0 || num_blocks == 0 ||
        content / block != (Py_ssize_t)num_blocks || content % block || most > header ||
        root_nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "Layout: sizes that do not fit each other");
        return NULL;
    }
    Layout *self = (Layout *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->head = Py_NewRef(head);
    self->middle = Py_NewRef(middle);
    self->rows = Py_NewRef(rows);
    self->tail = Py_NewRef(tail);
    file.head = (uint8_t *)PyBytes_AS_STRING(head);
    file.middle = (uint8_t *)PyBytes_AS_STRING(middle);
    file.rows = (uint8_t *)PyBytes_AS_STRING(rows);
    file.tail = (uint8_t *)PyBytes_AS_STRING(tail);
    file.head_nbytes = (size_t)PyBytes_GET_SIZE(head);
    file.middle_nbytes = (size_t)PyBytes_GET_SIZE(middle);
    file.rows_nbytes = (size_t)PyBytes_GET_SIZE(rows);
    file.tail_nbytes = (size_t)PyBytes_GET_SIZE(tail);
    file.header_nbytes = (size_t)header;
    file.payload_nbytes = (size_t)payload;
    file.content_nbytes = (size_t)content;
    file.block_nbytes = (size_t)block;
    file.num_blocks = num_blocks;
    file.format_version = version;
    file.file_mode = (mode_t)file_mode;
    file.dir_mode = (mode_t)dir_mode;
    file.root_nbytes = (size_t)root_nbytes;
    self->file = file;
    return (PyObject *)self;
}

static void Layout_dealloc(Layout *self)
{
    Py_XDECREF(self->head);
    Py_XDECREF(self->middle);
    Py_XDECREF(self->rows);
    Py_XDECREF(self->tail);
    Py_TYPE(self)->tp_free(self);
}

PyTypeObject LayoutType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Layout",
    .tp_doc = "Layout(...): what all chunk files of a group have in common.",
    .tp_basicsize = sizeof(Layout),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = Layout_new,
    .tp_dealloc = (destructor)Layout_dealloc,
};

/* --- Transfer ---------------------------------------------------------------------------- */

static PyObject *Transfer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"owner", "is_load",     "layout",     "pages",   "guard", "path", "part",
                            "key",   "spans",       "first_block", "num_blocks", "replace", NULL};
    PyObject *owner, *layout = Py_None, *pages = Py_None, *guard = Py_None, *spans = Py_None;
    PyObject *path = NULL, *part = NULL, *key = NULL;
    int is_load, replace = 0;
    unsigned int first_block = 0, num_blocks = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Op|OOOSSSOIIp:Transfer", names, &owner, &is_load,
                                     &layout, &pages, &guard, &path, &part, &key, &spans,
                                     &first_block, &num_blocks, &replace))
        return NULL;
    bool native = layout != Py_None;
    if (native && (!PyObject_TypeCheck(layout, &LayoutType) || !path || !part || !key ||
                   !PyObject_TypeCheck(guard, &GuardType) ||
                   (pages != Py_None && !PyObject_TypeCheck(pages, &PagesType)))) {
        PyErr_SetString(PyExc_TypeError, "Transfer: needs a Layout, Pages or None, and a Guard");
        return NULL;
    }
    if (native && (PyBytes_GET_SIZE(key) == 0 || PyBytes_GET_SIZE(key) > 255 ||
                   strlen(PyBytes_AS_STRING(path)) != (size_t)PyBytes_GET_SIZE(path) ||
                   strlen(PyBytes_AS_STRING(part)) != (size_t)PyBytes_GET_SIZE(part) ||
                   num_blocks == 0 || num_blocks > ((Layout *)layout)->file.num_blocks ||
                   first_block > ((Layout *)layout)->file.num_blocks - num_blocks)) {
        PyErr_SetString(PyExc_ValueError, "Transfer: a key of 1 to 255 bytes, paths, blocks inside");
        return NULL;
    }
    Transfer *self = (Transfer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->owner = Py_NewRef(owner);
    self->is_load = is_load;
    if (!native)
        return (PyObject *)self;
    self->layout = (Layout *)Py_NewRef(layout);
    self->guard = (Guard *)Py_NewRef(guard);
    self->path = Py_NewRef(path);
    self->part = Py_NewRef(part);
    self->key = Py_NewRef(key);
    if (pages != Py_None) {
        const FileLayout *file = &self->layout->file;
        self->pages = (Pages *)Py_NewRef(pages);
        if (PyObject_GetBuffer(spans, &self->spans, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0 ||
            !spans_fit(self->pages, &self->spans, 0, file->content_nbytes)) {
            Py_DECREF(self);
            return NULL;
        }
    }
    self->file = (ChunkFile){
        .path = PyBytes_AS_STRING(path),
        .part = PyBytes_AS_STRING(part),
        .key = (uint8_t *)PyBytes_AS_STRING(key),
        .key_nbytes = (size_t)PyBytes_GET_SIZE(key),
        .first_block = first_block,
        .num_blocks = num_blocks,
        .replace = replace,
    };
    return (PyObject *)self;
}

static int Transfer_traverse(Transfer *self, visitproc visit, void *arg)
{
    Py_VISIT(self->owner);
    return 0;
}

static int Transfer_clear(Transfer *self)
{
    Py_CLEAR(self->owner);
    return 0;
}

static void Transfer_dealloc(Transfer *self)
{
    PyObject_GC_UnTrack(self);
    Py_XDECREF(self->owner);
    Py_XDECREF(self->layout);
    Py_XDECREF(self->pages);
    Py_XDECREF(self->guard);
    Py_XDECREF(self->path);
    Py_XDECREF(self->part);
    Py_XDECREF(self->key);
    if (self->spans.obj != NULL)
        PyBuffer_Release(&self->spans);
    if (self->slot.obj != NULL)
        PyBuffer_Release(&self->slot);
    Py_TYPE(self)->tp_free(self);
}

int slot_buffer(PyObject *slot, Py_buffer *view)
{
    PyObject *array = PyObject_GetAttrString(slot, "array");
    if (array == NULL)
        return -1;
    int result = PyObject_GetBuffer(array, view, PyBUF_WRITABLE);
    Py_DECREF(array);
    return result;
}

static PyObject *Transfer_use_slot(Transfer *self, PyObject *slot)
{
    if (self->state != NEW || self->layout == NULL || self->slot.obj != NULL) {
        PyErr_SetString(PyExc_ValueError, "use_slot: only before it is queued");
        return NULL;
    }
    Py_buffer view;
    if (slot_buffer(slot, &view) != 0)
        return NULL;
    const FileLayout *file = &self->layout->file;
    if ((size_t)view.len < file->header_nbytes + file->payload_nbytes) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "use_slot: the slot is too small");
        return NULL;
    }
    self->slot = view;
    self->gathered = !self->is_load;
    Py_RETURN_NONE;
}

static PyObject *Transfer_hold(Transfer *self, PyObject *unused)
{
    if (self->state != NEW || !self->is_load) {
        PyErr_SetString(PyExc_ValueError, "hold: only a load, before it is queued");
        return NULL;
    }
    self->held = true;
    Py_RETURN_NONE;
}

static PyObject *Transfer_write(Transfer *self, PyObject *slot)
{
    Py_buffer view;
    if (self->layout == NULL || slot_buffer(slot, &view) != 0)
        return self->layout ? NULL : PyErr_Format(PyExc_ValueError, "write: no layout");
    ChunkResult result = CHUNK_OTHERWISE;
    const FileLayout *file = &self->layout->file;
    if ((size_t)view.len >= file->header_nbytes + file->payload_nbytes) {
        Py_BEGIN_ALLOW_THREADS
        self->tried = true;
        result = chunk_write(file, &self->file, view.buf, false);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return PyLong_FromLong(result);
}

static PyMethodDef Transfer_methods[] = {
    {"use_slot", (PyCFunction)Transfer_use_slot, METH_O,
     "use_slot(slot): its own, kept until the end; a store's pages are in it already."},
    {"hold", (PyCFunction)Transfer_hold, METH_NOARGS,
     "hold(): its pages are still in use; once it was read it waits in its slot for the queue's release."},
    {"write", (PyCFunction)Transfer_write, METH_O,
     "write(slot): publish the gathered slot; WRITE_OK, WRITE_EXISTS, or else nothing was done."},
    {NULL},
};

static PyObject *Transfer_started_at(Transfer *self, void *unused)
{
    if (self->started_at == 0)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(self->started_at);
}

static PyObject *Transfer_began_at(Transfer *self, void *unused)
{
    if (self->began_at == 0)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(self->began_at);
}

static PyGetSetDef Transfer_getset[] = {
    {"began_at", (getter)Transfer_began_at, NULL, "Of a load that was parked: when it was begun.", NULL},
    {"started_at", (getter)Transfer_started_at, NULL, NULL, NULL},
    {NULL},
};

static PyMemberDef Transfer_members[] = {
    {"owner", T_OBJECT, offsetof(Transfer, owner), READONLY, "None once it has ended."},
    {"native", T_OBJECT, offsetof(Transfer, layout), READONLY, "Its Layout, or None."},
    {"gathered", T_BOOL, offsetof(Transfer, gathered), READONLY, NULL},
    {"tried", T_BOOL, offsetof(Transfer, tried), READONLY, "Store: writing was tried here."},
    {"old_mtime", T_BOOL, offsetof(Transfer, old_mtime), READONLY, NULL},
    {"checked", T_BOOL, offsetof(Transfer, checked), READONLY, NULL},
    {NULL},
};

PyTypeObject TransferType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Transfer",
    .tp_doc = "Transfer(owner, is_load, ...): one chunk on its way between KV pages and a file.",
    .tp_basicsize = sizeof(Transfer),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Transfer_new,
    .tp_dealloc = (destructor)Transfer_dealloc,
    .tp_traverse = (traverseproc)Transfer_traverse,
    .tp_clear = (inquiry)Transfer_clear,
    .tp_methods = Transfer_methods,
    .tp_getset = Transfer_getset,
    .tp_members = Transfer_members,
};

#include "types.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <structmember.h>
#include <sys/stat.h>
#include <time.h>

double monotonic_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* --- Guard ------------------------------------------------------------------------------- */

static PyObject *Guard_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    int open;
    if (!PyArg_ParseTuple(args, "p:Guard", &open))
        return NULL;
    Guard *self = (Guard *)type->tp_alloc(type, 0);
    if (self != NULL) {
        pthread_mutex_init(&self->mutex, NULL);
        pthread_cond_init(&self->changed, NULL);
        self->gate = open ? OPEN : SHUT;
    }
    return (PyObject *)self;
}

static void Guard_dealloc(Guard *self)
{
    pthread_mutex_destroy(&self->mutex);
    pthread_cond_destroy(&self->changed);
    Py_TYPE(self)->tp_free(self);
}

bool guard_enter(Guard *guard)
{
    pthread_mutex_lock(&guard->mutex);
    while (guard->gate == SHUT)
        pthread_cond_wait(&guard->changed, &guard->mutex);
    bool allowed = guard->gate == OPEN;
    guard->num_inside += allowed;
    pthread_mutex_unlock(&guard->mutex);
    return allowed;
}

void guard_leave(Guard *guard)
{
    pthread_mutex_lock(&guard->mutex);
    guard->num_inside--;
    pthread_cond_broadcast(&guard->changed);
    pthread_mutex_unlock(&guard->mutex);
}

bool guard_shut(Guard *guard)
{
    pthread_mutex_lock(&guard->mutex);
    bool shut = guard->gate == SHUT;
    pthread_mutex_unlock(&guard->mutex);
    return shut;
}

static PyObject *Guard_open(Guard *self, PyObject *unused)
{
    pthread_mutex_lock(&self->mutex);
    if (self->gate == SHUT)
        self->gate = OPEN;
    pthread_cond_broadcast(&self->changed);
    pthread_mutex_unlock(&self->mutex);
    Py_RETURN_NONE;
}

static PyObject *Guard_abandon(Guard *self, PyObject *unused)
{
    Py_BEGIN_ALLOW_THREADS
    pthread_mutex_lock(&self->mutex);
    self->gate = ABANDONED;
    pthread_cond_broadcast(&self->changed);
    while (self->num_inside > 0)
        pthread_cond_wait(&self->changed, &self->mutex);
    pthread_mutex_unlock(&self->mutex);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *Guard_abandoned(Guard *self, void *unused)
{
    pthread_mutex_lock(&self->mutex);
    bool abandoned = self->gate == ABANDONED;
    pthread_mutex_unlock(&self->mutex);
    return PyBool_FromLong(abandoned);
}

static PyMethodDef Guard_methods[] = {
    {"open", (PyCFunction)Guard_open, METH_NOARGS,
     "open(): the device uses the pages no more; threads that wait for the gate go on."},
    {"abandon", (PyCFunction)Guard_abandon, METH_NOARGS,
     "abandon(): from the return on no thread touches the pages; waits for memory copies only."},
    {NULL},
};

static PyGetSetDef Guard_getset[] = {
    {"abandoned", (getter)Guard_abandoned, NULL, NULL, NULL},
    {NULL},
};

PyTypeObject GuardType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Guard",
    .tp_doc = "Guard(open): the gate before a job's KV pages, shut while the device still uses them.",
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
                            "root_nbytes",   "directory",      "suffix",       "keys",
                            "context",       NULL};
    FileLayout file = {0};
    Py_ssize_t header, payload, content, block;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y#y#y#y#nnnnIIippIIdny#y#z#y#:Layout", names, &file.head,
                                     &file.head_nbytes, &file.middle, &file.middle_nbytes, &file.rows,
                                     &file.rows_nbytes, &file.tail, &file.tail_nbytes, &header, &payload, &content,
                                     &block, &file.num_blocks, &file.format_version, &file.open_flags, &file.fsync,
                                     &file.touch, &file.file_mode, &file.dir_mode, &file.touch_interval_s,
                                     &file.root_nbytes, &file.directory, &file.directory_nbytes, &file.suffix,
                                     &file.suffix_nbytes, &file.sealed.keys, &file.sealed.keys_nbytes,
                                     &file.sealed.context, &file.sealed.context_nbytes))
        return NULL;
    file.payload_nbytes = payload > 0 ? (size_t)payload : 0;
    /* The pieces, the longest key, both integers, the digests. */
    Py_ssize_t most = 32 + file.head_nbytes + file.middle_nbytes + file.rows_nbytes + file.tail_nbytes + 2 + 255 + 5 +
                      9 + (Py_ssize_t)rows_field_nbytes(&file);
    if (header <= 0 || header % 4096 || payload <= 0 || payload % 4096 || content <= 0 ||
        content > payload || block <= 0 || file.num_blocks == 0 ||
        content / block != (Py_ssize_t)file.num_blocks || content % block || most > header ||
        file.sealed.context_nbytes > MAX_CONTEXT || file.sealed.keys_nbytes % (KEY_ID + KEY) ||
        (file.sealed.keys != NULL && file.sealed.keys_nbytes == 0) ||
        file.root_nbytes < 0 || strlen(file.directory) != (size_t)file.directory_nbytes ||
        strlen(file.suffix) != (size_t)file.suffix_nbytes) {
        PyErr_SetString(PyExc_ValueError, "Layout: sizes that do not fit each other, or a zero in a name");
        return NULL;
    }
    file.header_nbytes = (size_t)header;
    file.content_nbytes = (size_t)content;
    file.block_nbytes = (size_t)block;
    Layout *self = (Layout *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->args = Py_NewRef(args);
        self->kwargs = Py_XNewRef(kwargs);
        self->file = file;
    }
    return (PyObject *)self;
}

static void Layout_dealloc(Layout *self)
{
    Py_XDECREF(self->args);
    Py_XDECREF(self->kwargs);
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

/* The stamp of a use (chunk_io.h): the eight bytes of a bytearray that nobody resizes; sets ValueError. */
int64_t *use_stamp(PyObject *use)
{
    if (PyByteArray_Check(use) && PyByteArray_GET_SIZE(use) == 8)
        return (int64_t *)PyByteArray_AS_STRING(use);
    PyErr_SetString(PyExc_ValueError, "a use: expected a bytearray of 8");
    return NULL;
}

/* --- Transfer ---------------------------------------------------------------------------- */

/* Read the engine's numbers of the blocks. */
static bool take_blocks(Transfer *self, PyObject *object, Py_ssize_t num_blocks)
{
    PyObject *ids = PySequence_Tuple(object); /* a list may be changed by the numbers' own code */
    if (ids == NULL)
        return false;
    bool good = PyTuple_GET_SIZE(ids) == num_blocks &&
                (self->blocks.ids = PyMem_RawMalloc((size_t)num_blocks * sizeof(int64_t))) != NULL;
    for (Py_ssize_t i = 0; good && i < num_blocks && !PyErr_Occurred(); i++)
        self->blocks.ids[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(ids, i));
    Py_DECREF(ids);
    self->blocks.num = (uint32_t)num_blocks;
    if (PyErr_Occurred())
        return false;
    if (!good || !blocks_fit(self->placement, &self->blocks)) {
        PyErr_SetString(PyExc_ValueError, "Transfer: blocks outside of their tensors, or not as many as said");
        return false;
    }
    return true;
}

/* Name its file, and the part that a store writes: `<directory>/<3 hex>/`, the digits and the suffix, or `part`. */
static bool make_paths(Transfer *self, const char *name, const char *part)
{
    const FileLayout *layout = &self->layout->file;
    size_t directory = (size_t)layout->directory_nbytes, shard = directory + 1 + SHARD + 1;
    size_t suffix = (size_t)layout->suffix_nbytes + 1, part_nbytes = part ? strlen(part) + 1 : 0;
    char *path = self->paths = PyMem_RawMalloc(2 * shard + NAME + suffix + part_nbytes);
    if (path == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(path, layout->directory, directory);
    path[directory] = path[shard - 1] = '/';
    memcpy(path + directory + 1, name, SHARD);
    self->file.path = path;
    if (part_nbytes > 0) {
        char *beside = path + shard + NAME + suffix;
        memcpy(beside, path, shard);
        memcpy(beside + shard, part, part_nbytes);
        self->file.part = beside;
    }
    memcpy(path + shard, name, NAME);
    memcpy(path + shard + NAME, layout->suffix, suffix);
    return true;
}

static PyObject *Transfer_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *owner, *guard, *layout = NULL, *placement = NULL, *blocks = NULL, *key = NULL, *use = Py_None;
    const char *name = NULL, *part = NULL;
    int is_load, replace = 0;
    unsigned int first_block = 0, num_blocks = 0, depth = 0;
    long long base = 0;
    if (!PyArg_ParseTuple(args, "OpO!|O!O!SszIIOLpOI:Transfer", &owner, &is_load, &GuardType, &guard, &LayoutType,
                          &layout, &PlacementType, &placement, &key, &name, &part, &first_block, &num_blocks,
                          &blocks, &base, &replace, &use, &depth))
        return NULL;
    const FileLayout *file = layout ? &((Layout *)layout)->file : NULL;
    if (use != Py_None && use_stamp(use) == NULL)
        return NULL;
    if (file != NULL &&
        (blocks == NULL || strlen(name) != NAME || PyBytes_GET_SIZE(key) == 0 || PyBytes_GET_SIZE(key) > 255 || (part == NULL) != is_load ||
         num_blocks == 0 || num_blocks > file->num_blocks || first_block > file->num_blocks - num_blocks ||
         ((Placement *)placement)->block_nbytes != file->block_nbytes)) {
        PyErr_SetString(PyExc_ValueError,
                        "Transfer: a key of 1 to 255 bytes, 32 digits, a part for a store, blocks inside and of their size");
        return NULL;
    }
    Transfer *self = (Transfer *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    self->owner = Py_NewRef(owner);
    self->guard = (Guard *)Py_NewRef(guard);
    self->is_load = is_load;
    if (file == NULL)
        return (PyObject *)self;
    self->layout = (Layout *)Py_NewRef(layout);
    self->placement = (Placement *)Py_NewRef(placement);
    self->key = Py_NewRef(key);
    self->use = Py_NewRef(use);
    self->blocks.base = base;
    self->file = (ChunkFile){
        .key = (uint8_t *)PyBytes_AS_STRING(key),
        .key_nbytes = (size_t)PyBytes_GET_SIZE(key),
        .first_block = first_block,
        .num_blocks = num_blocks,
        .replace = replace,
        .use_ns = use == Py_None ? NULL : use_stamp(use),
        .depth = depth,
    };
    if (!make_paths(self, name, part) || !take_blocks(self, blocks, num_blocks))
        Py_CLEAR(self);
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
    Py_XDECREF(self->placement);
    Py_XDECREF(self->guard);
    Py_XDECREF(self->key);
    Py_XDECREF(self->use);
    PyMem_RawFree(self->paths);
    PyMem_RawFree(self->blocks.ids);
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

static PyObject *Transfer_gather(Transfer *self, PyObject *slot)
{
    if (self->state != NEW || self->is_load || self->layout == NULL || self->slot.obj != NULL)
        return PyErr_Format(PyExc_ValueError, "gather: only a store, before it is queued");
    Py_buffer view;
    if (slot_buffer(slot, &view) != 0)
        return NULL;
    const FileLayout *file = &self->layout->file;
    bool good = false;
    if ((size_t)view.len < file->header_nbytes + file->payload_nbytes) {
        PyErr_SetString(PyExc_ValueError, "gather: the slot is too small");
    } else {
        Py_BEGIN_ALLOW_THREADS
        good = gather(self, view.buf);
        Py_END_ALLOW_THREADS
    }
    if (good)
        self->slot = view;
    else
        PyBuffer_Release(&view);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(good);
}

static PyMethodDef Transfer_methods[] = {
    {"gather", (PyCFunction)Transfer_gather, METH_O,
     "gather(slot): copy a store's pages into `slot` now, and keep it until the end; False: the device says no."},
    {NULL},
};

static PyObject *Transfer_started_at(Transfer *self, void *unused)
{
    if (self->started_at == 0)
        Py_RETURN_NONE;
    return PyFloat_FromDouble(self->started_at);
}

static PyObject *Transfer_state(Transfer *self, void *unused)
{
    return PyLong_FromLong(self->state);
}

static PyGetSetDef Transfer_getset[] = {
    {"started_at", (getter)Transfer_started_at, NULL, NULL, NULL},
    {"state", (getter)Transfer_state, NULL, "See fskv.data_path.job.State.", NULL},
    {NULL},
};

static PyMemberDef Transfer_members[] = {
    {"layout", T_OBJECT, offsetof(Transfer, layout), READONLY, "None: every step is Python's."},
    {"owner", T_OBJECT, offsetof(Transfer, owner), READONLY, "None once it has ended."},
    {"old_mtime", T_BOOL, offsetof(Transfer, old_mtime), READONLY, "Load: its file wants to be touched."},
    {"waited_s", T_DOUBLE, offsetof(Transfer, waited_s), READONLY, "Seconds for its job's gate."},
    {"at_disk_since", T_DOUBLE, offsetof(Transfer, at_disk_since), READONLY,
     "When its thread took it, or its pages were free; 0 before."},
    {NULL},
};

PyTypeObject TransferType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fskv._native.Transfer",
    .tp_doc = "Transfer(owner, is_load, guard, ...): one chunk on its way between KV pages and a file.",
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

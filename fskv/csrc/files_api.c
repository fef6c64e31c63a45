/* What fskv.index asks of files.c, in Python's words. The lock of the interpreter is released for a whole batch;
 * meanwhile only immutable objects are read, to which a reference is held.
 */
#include "files_api.h"

#include "files.h"
#include "types.h"
#include "xxh3.h"

typedef struct {
    long idx;
    RankFile *files;
    Py_ssize_t num_files;
} Group;

typedef struct {
    const uint8_t *key;
    size_t key_nbytes;
    const Group *group;
    int answer;
} Probe;

/* Everything that a batch needs without the interpreter. */
typedef struct {
    PyObject *chunks; /* a tuple */
    PyObject *table;  /* our own dict of tuples; `groups` points into it */
    Group *groups;
    Py_ssize_t num_groups;
    ShardsDir *directories;
    size_t num_directories;
    Probe *probes;
    char *path;
    size_t path_room;
    double seconds; /* of the disk: without the time that it took to get the interpreter's lock back */
} Batch;

static void free_batch(Batch *batch)
{
    for (Py_ssize_t g = 0; g < batch->num_groups; g++)
        PyMem_Free(batch->groups[g].files);
    PyMem_Free(batch->groups);
    PyMem_Free(batch->directories);
    PyMem_Free(batch->probes);
    PyMem_Free(batch->path);
    Py_XDECREF(batch->chunks);
    Py_XDECREF(batch->table);
}

static const ShardsDir *find_directory(Batch *batch, const char *path, size_t nbytes)
{
    for (size_t i = 0; i < batch->num_directories; i++) {
        const ShardsDir *known = &batch->directories[i];
        if (known->path_nbytes == nbytes && memcmp(known->path, path, nbytes) == 0)
            return known;
    }
    ShardsDir *found = &batch->directories[batch->num_directories++];
    *found = (ShardsDir){path, nbytes, -1};
    return found;
}

static bool take_file(Batch *batch, PyObject *item, RankFile *file)
{
    PyObject *directory, *suffix;
    long long nbytes;
    if (!PyTuple_Check(item)) {
        PyErr_SetString(PyExc_TypeError, "probe_chunks: a file must be a tuple");
        return false;
    }
    if (!PyArg_ParseTuple(item, "SSL:probe_chunks", &directory, &suffix, &nbytes))
        return false;
    size_t path_nbytes = (size_t)PyBytes_GET_SIZE(directory),
           suffix_nbytes = (size_t)PyBytes_GET_SIZE(suffix);
    if (strlen(PyBytes_AS_STRING(directory)) != path_nbytes
        || strlen(PyBytes_AS_STRING(suffix)) != suffix_nbytes) {
        PyErr_SetString(PyExc_ValueError, "probe_chunks: a name has a zero in it");
        return false;
    }
    *file = (RankFile){find_directory(batch, PyBytes_AS_STRING(directory), path_nbytes),
                       PyBytes_AS_STRING(suffix), suffix_nbytes, nbytes};
    size_t room = path_nbytes + 1 + 3 + 1 + 32 + suffix_nbytes + 1;
    batch->path_room = room > batch->path_room ? room : batch->path_room;
    return true;
}

static bool take_groups(Batch *batch)
{
    PyObject *idx, *files;
    Py_ssize_t at = 0, num_files = 0;
    batch->groups = PyMem_Calloc((size_t)PyDict_GET_SIZE(batch->table) + 1, sizeof(Group));
    while (batch->groups != NULL && PyDict_Next(batch->table, &at, &idx, &files)) {
        if (!PyTuple_Check(files) || PyTuple_GET_SIZE(files) == 0) {
            PyErr_SetString(PyExc_ValueError,
                            "probe_chunks: a group's files must be a tuple with at least one");
            return false;
        }
        num_files += PyTuple_GET_SIZE(files);
    }
    batch->directories = PyMem_Calloc((size_t)num_files + 1, sizeof(ShardsDir));
    if (batch->groups == NULL || batch->directories == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (at = 0; PyDict_Next(batch->table, &at, &idx, &files);) {
        Group *group = &batch->groups[batch->num_groups++];
        group->idx = PyLong_AsLong(idx);
        if (group->idx == -1 && PyErr_Occurred())
            return false;
        group->num_files = PyTuple_GET_SIZE(files);
        group->files = PyMem_Calloc((size_t)group->num_files, sizeof(RankFile));
        if (group->files == NULL) {
            PyErr_NoMemory();
            return false;
        }
        for (Py_ssize_t i = 0; i < group->num_files; i++)
            if (!take_file(batch, PyTuple_GET_ITEM(files, i), &group->files[i]))
                return false;
    }
    return true;
}

static bool take_chunks(Batch *batch)
{
    Py_ssize_t count = PyTuple_GET_SIZE(batch->chunks);
    const Group *group = NULL;
    batch->probes = PyMem_Calloc((size_t)count + 1, sizeof(Probe));
    batch->path = PyMem_Malloc(batch->path_room + 1);
    if (batch->probes == NULL || batch->path == NULL) {
        PyErr_NoMemory();
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *chunk = PyTuple_GET_ITEM(batch->chunks, i);
        if (!PyTuple_Check(chunk) || PyTuple_GET_SIZE(chunk) != 2
            || !PyBytes_Check(PyTuple_GET_ITEM(chunk, 0))) {
            PyErr_SetString(PyExc_TypeError,
                            "probe_chunks: a chunk must be a tuple of bytes and a group");
            return false;
        }
        PyObject *key = PyTuple_GET_ITEM(chunk, 0);
        long idx = PyLong_AsLong(PyTuple_GET_ITEM(chunk, 1));
        if (idx == -1 && PyErr_Occurred())
            return false;
        for (Py_ssize_t g = 0; group == NULL || group->idx != idx; g++) {
            if (g == batch->num_groups) {
                PyErr_Format(PyExc_KeyError, "probe_chunks: group %ld has no files", idx);
                return false;
            }
            group = &batch->groups[g];
        }
        batch->probes[i] = (Probe){(const uint8_t *)PyBytes_AS_STRING(key),
                                   (size_t)PyBytes_GET_SIZE(key), group, 0};
    }
    return true;
}

static PyObject *answers_of(const Batch *batch)
{
    Py_ssize_t count = PyTuple_GET_SIZE(batch->chunks);
    PyObject *found = PyBytes_FromStringAndSize(NULL, count), *errors = PyList_New(0);
    bool good = found != NULL && errors != NULL;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        int answer = batch->probes[i].answer;
        PyBytes_AS_STRING(found)[i] = answer == 1;
        if (answer < 0) {
            PyObject *error = Py_BuildValue("ni", i, -answer);
            good = error != NULL && PyList_Append(errors, error) == 0;
            Py_XDECREF(error);
        }
    }
    PyObject *all = good ? Py_BuildValue("OOd", found, errors, batch->seconds) : NULL;
    Py_XDECREF(found);
    Py_XDECREF(errors);
    return all;
}

PyObject *probe_chunks(PyObject *module, PyObject *args)
{
    PyObject *chunks, *files, *result = NULL;
    Py_buffer missed;
    Batch batch = {0};
    if (!PyArg_ParseTuple(args, "Oy*O!:probe_chunks", &chunks, &missed, &PyDict_Type, &files))
        return NULL;
    batch.table = PyDict_Copy(files);
    batch.chunks = PySequence_Tuple(chunks);
    if (batch.table == NULL || batch.chunks == NULL)
        goto done;
    if (PyTuple_GET_SIZE(batch.chunks) != missed.len) {
        PyErr_Format(PyExc_ValueError, "probe_chunks: %zd chunks, but missed_before has %zd bytes",
                     PyTuple_GET_SIZE(batch.chunks), missed.len);
        goto done;
    }
    if (!take_groups(&batch) || !take_chunks(&batch))
        goto done;

    Py_BEGIN_ALLOW_THREADS
    batch.seconds = -monotonic_s();
    if (missed.len > 0)
        for (size_t i = 0; i < batch.num_directories; i++)
            shards_open(&batch.directories[i]);
    for (Py_ssize_t i = 0; i < missed.len; i++) {
        Probe *probe = &batch.probes[i];
        probe->answer =
            probe_chunk(probe->group->files, (size_t)probe->group->num_files, probe->key,
                        probe->key_nbytes, ((const char *)missed.buf)[i] != 0, batch.path);
    }
    for (size_t i = 0; i < batch.num_directories; i++)
        shards_close(&batch.directories[i]);
    batch.seconds += monotonic_s();
    Py_END_ALLOW_THREADS
    result = answers_of(&batch);
done:
    free_batch(&batch);
    PyBuffer_Release(&missed);
    return result;
}

PyObject *list_shard(PyObject *module, PyObject *args)
{
    PyObject *object;
    char *path;
    Py_ssize_t nbytes;
    long long young_ns = INT64_MAX, newest_ns = INT64_MAX;
    if (!PyArg_ParseTuple(args, "S|LL:list_shard", &object, &young_ns, &newest_ns)
        || PyBytes_AsStringAndSize(object, &path, &nbytes) != 0)
        return NULL;
    if (strlen(path) != (size_t)nbytes) {
        PyErr_SetString(PyExc_ValueError, "list_shard: the path has a zero in it");
        return NULL;
    }
    Shard shard;
    int error;
    Py_BEGIN_ALLOW_THREADS
    error = shard_list(path, young_ns, newest_ns, &shard);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL, *others = NULL;
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, object);
    } else if ((others = PyList_New(0)) != NULL) {
        bool good = true;
        for (size_t at = 0; good && at < shard.others_nbytes; at += strlen(shard.others + at) + 1) {
            PyObject *other = PyBytes_FromString(shard.others + at);
            good = other != NULL && PyList_Append(others, other) == 0;
            Py_XDECREF(other);
        }
        if (good)
            /* y# makes None of NULL */
            result = Py_BuildValue("y#O", shard.records ? (const char *)shard.records : "",
                                   (Py_ssize_t)(shard.num_records * sizeof(ShardRecord)), others);
        Py_DECREF(others);
    }
    shard_free(&shard);
    return result;
}

PyObject *open_directory(PyObject *module, PyObject *args)
{
    PyObject *object;
    Py_ssize_t root_nbytes;
    int flags, fd;
    if (!PyArg_ParseTuple(args, "Sni:open_beneath", &object, &root_nbytes, &flags))
        return NULL;
    const char *path = PyBytes_AS_STRING(object);
    size_t nbytes = (size_t)PyBytes_GET_SIZE(object);
    if (strlen(path) != nbytes || root_nbytes < 0) {
        PyErr_SetString(PyExc_ValueError, "open_beneath: the path has a zero in it, or its root no length");
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    fd = open_beneath(path, (size_t)root_nbytes, nbytes, flags);
    Py_END_ALLOW_THREADS
    return fd < 0 ? PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, object) : PyLong_FromLong(fd);
}

PyObject *name_digest(PyObject *module, PyObject *object)
{
    char *key;
    Py_ssize_t nbytes;
    uint8_t digest[16];
    if (PyBytes_AsStringAndSize(object, &key, &nbytes) != 0)
        return NULL;
    xxh3_128((const uint8_t *)key, (size_t)nbytes, digest);
    return PyBytes_FromStringAndSize((const char *)digest, sizeof digest);
}

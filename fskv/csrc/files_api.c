/* What fskv.index asks of files.c, in Python's words. The lock of the interpreter is released for a whole batch;
 * meanwhile only immutable objects are read, to which a reference is held.
 */
#include "files_api.h"

#include "files.h"
#include "types.h"

typedef struct {
    long idx;
    RankFile *files;
    Py_ssize_t num_files;
} Group;

/* Everything that a batch needs without the interpreter. */
typedef struct {
    PyObject *table; /* our own dict of tuples; `groups` points into it */
    Group *groups;
    Py_ssize_t num_groups;
    ShardsDir *directories;
    Py_ssize_t num_directories;
    const Group **wanted; /* of each chunk */
    int *answers;
    size_t path_nbytes, suffix_nbytes; /* the longest */
    double seconds; /* of the disk: without the time that it took to get the interpreter's lock back */
} Batch;

static void free_batch(Batch *batch)
{
    for (Py_ssize_t g = 0; g < batch->num_groups; g++)
        PyMem_Free(batch->groups[g].files);
    PyMem_Free(batch->groups);
    PyMem_Free(batch->directories);
    PyMem_Free(batch->wanted);
    PyMem_Free(batch->answers);
    Py_XDECREF(batch->table);
}

static bool no_memory(void)
{
    PyErr_NoMemory();
    return false;
}

static bool take_name(PyObject *object, const char **name, size_t *nbytes, size_t *longest)
{
    if (!PyBytes_Check(object) || strlen(PyBytes_AS_STRING(object)) != (size_t)PyBytes_GET_SIZE(object)) {
        PyErr_SetString(PyExc_ValueError, "probe_chunks: a name must be bytes, and without a zero");
        return false;
    }
    *name = PyBytes_AS_STRING(object);
    *nbytes = (size_t)PyBytes_GET_SIZE(object);
    *longest = *nbytes > *longest ? *nbytes : *longest;
    return true;
}

static bool take_directories(Batch *batch, PyObject *paths)
{
    batch->num_directories = PyTuple_GET_SIZE(paths);
    batch->directories = PyMem_Calloc((size_t)batch->num_directories + 1, sizeof(ShardsDir));
    if (batch->directories == NULL)
        return no_memory();
    for (Py_ssize_t i = 0; i < batch->num_directories; i++) {
        ShardsDir *directory = &batch->directories[i];
        directory->fd = -1;
        if (!take_name(PyTuple_GET_ITEM(paths, i), &directory->path, &directory->path_nbytes, &batch->path_nbytes))
            return false;
    }
    return true;
}

static bool take_files(Batch *batch, Group *group, PyObject *files)
{
    Py_ssize_t at, num_files = PyTuple_Check(files) ? PyTuple_GET_SIZE(files) : 0;
    group->files = PyMem_Calloc((size_t)num_files + 1, sizeof(RankFile));
    if (group->files == NULL)
        return no_memory();
    for (; group->num_files < num_files; group->num_files++) {
        RankFile *file = &group->files[group->num_files];
        PyObject *item = PyTuple_GET_ITEM(files, group->num_files), *suffix;
        long long nbytes;
        if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "nOL:probe_chunks", &at, &suffix, &nbytes)
            || !take_name(suffix, &file->suffix, &file->suffix_nbytes, &batch->suffix_nbytes) || at < 0
            || at >= batch->num_directories)
            break;
        file->directory = &batch->directories[at];
        file->nbytes = nbytes;
    }
    if (!PyErr_Occurred() && (num_files == 0 || group->num_files < num_files))
        PyErr_SetString(PyExc_ValueError,
                        "probe_chunks: a group has a tuple of files, of a directory, a suffix and a size each");
    return !PyErr_Occurred();
}

static bool take_groups(Batch *batch)
{
    PyObject *idx, *files;
    batch->groups = PyMem_Calloc((size_t)PyDict_GET_SIZE(batch->table) + 1, sizeof(Group));
    if (batch->groups == NULL)
        return no_memory();
    for (Py_ssize_t at = 0; PyDict_Next(batch->table, &at, &idx, &files);) {
        Group *group = &batch->groups[batch->num_groups++];
        group->idx = PyLong_AsLong(idx);
        if ((group->idx == -1 && PyErr_Occurred()) || !take_files(batch, group, files))
            return false;
    }
    return true;
}

static bool take_chunks(Batch *batch, PyObject *groups)
{
    Py_ssize_t count = PyTuple_GET_SIZE(groups);
    const Group *group = NULL;
    batch->wanted = PyMem_Calloc((size_t)count + 1, sizeof *batch->wanted);
    batch->answers = PyMem_Calloc((size_t)count + 1, sizeof *batch->answers);
    if (batch->wanted == NULL || batch->answers == NULL)
        return no_memory();
    for (Py_ssize_t i = 0; i < count; i++) {
        long idx = PyLong_AsLong(PyTuple_GET_ITEM(groups, i));
        if (idx == -1 && PyErr_Occurred())
            return false;
        for (Py_ssize_t g = 0; group == NULL || group->idx != idx; g++) {
            if (g == batch->num_groups) {
                PyErr_Format(PyExc_KeyError, "probe_chunks: group %ld has no files", idx);
                return false;
            }
            group = &batch->groups[g];
        }
        batch->wanted[i] = group;
    }
    return true;
}

static void look(Batch *batch, const char *names, const char *missed, Py_ssize_t count, char *path)
{
    batch->seconds = -monotonic_s();
    if (count > 0)
        for (Py_ssize_t i = 0; i < batch->num_directories; i++)
            shards_open(&batch->directories[i]);
    for (Py_ssize_t i = 0; i < count; i++) {
        const Group *group = batch->wanted[i];
        batch->answers[i] =
            probe_chunk(group->files, (size_t)group->num_files, names + i * NAME, missed[i] != 0, path);
    }
    for (Py_ssize_t i = 0; i < batch->num_directories; i++)
        shards_close(&batch->directories[i]);
    batch->seconds += monotonic_s();
}

static PyObject *answers_of(const Batch *batch, Py_ssize_t count)
{
    PyObject *found = PyBytes_FromStringAndSize(NULL, count);
    Py_ssize_t num_errors = 0;
    int first = 0;
    for (Py_ssize_t i = 0; found != NULL && i < count; i++) {
        PyBytes_AS_STRING(found)[i] = batch->answers[i] == 1;
        num_errors += batch->answers[i] < 0;
        first = first == 0 && batch->answers[i] < 0 ? -batch->answers[i] : first;
    }
    return found ? Py_BuildValue("Nnid", found, num_errors, first, batch->seconds) : NULL;
}

PyObject *probe_chunks(PyObject *module, PyObject *args)
{
    PyObject *groups, *paths, *files, *result = NULL;
    const char *names, *missed;
    char *path = NULL;
    Py_ssize_t names_nbytes, count;
    Batch batch = {0};
    if (!PyArg_ParseTuple(args, "y#O!y#O!O!:probe_chunks", &names, &names_nbytes, &PyTuple_Type, &groups, &missed,
                          &count, &PyTuple_Type, &paths, &PyDict_Type, &files))
        return NULL;
    if (PyTuple_GET_SIZE(groups) != count || names_nbytes != count * NAME)
        return PyErr_Format(PyExc_ValueError, "probe_chunks: %zd chunks, %zd bytes of names, missed_before of %zd",
                            PyTuple_GET_SIZE(groups), names_nbytes, count);
    if ((batch.table = PyDict_Copy(files)) == NULL || !take_directories(&batch, paths) || !take_groups(&batch)
        || !take_chunks(&batch, groups))
        goto done;
    path = PyMem_Malloc(batch.path_nbytes + 1 + SHARD + 1 + NAME + batch.suffix_nbytes + 1);
    if (path == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    look(&batch, names, missed, count, path);
    Py_END_ALLOW_THREADS
    result = answers_of(&batch, count);
done:
    PyMem_Free(path);
    free_batch(&batch);
    return result;
}

PyObject *stamp_file(PyObject *module, PyObject *args)
{
    PyObject *use;
    const char *name;
    int directory, fresh;
    unsigned int depth;
    int64_t *use_ns;
    if (!PyArg_ParseTuple(args, "isOIp:stamp_use", &directory, &name, &use, &depth, &fresh)
        || (use_ns = use_stamp(use)) == NULL)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    stamp_use(directory, name, use_ns, depth, fresh);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

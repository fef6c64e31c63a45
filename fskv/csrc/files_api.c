/* What fskv.index asks of files.c, in Python's words. The lock of the interpreter is released for a whole batch;
 * meanwhile only immutable objects are read, which the arguments refer to.
 */
#include "files_api.h"

#include "files.h"
#include "types.h"

/* Take (suffix, size) of each file. NULL: an error is set. */
static RankFile *take_files(PyObject *files, size_t *longest)
{
    Py_ssize_t num_files = PyTuple_GET_SIZE(files);
    RankFile *taken = PyMem_Calloc((size_t)num_files + 1, sizeof *taken);
    if (taken == NULL)
        return (RankFile *)PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < num_files; i++) {
        PyObject *item = PyTuple_GET_ITEM(files, i);
        long long nbytes;
        if (!PyTuple_Check(item))
            PyErr_SetString(PyExc_TypeError, "probe_chunks: a file is a tuple of a suffix and a size");
        if (PyErr_Occurred() || !PyArg_ParseTuple(item, "yL:probe_chunks", &taken[i].suffix, &nbytes)) {
            PyMem_Free(taken);
            return NULL;
        }
        taken[i].suffix_nbytes = strlen(taken[i].suffix);
        taken[i].nbytes = nbytes;
        *longest = taken[i].suffix_nbytes > *longest ? taken[i].suffix_nbytes : *longest;
    }
    return taken;
}

PyObject *probe_chunks(PyObject *module, PyObject *args)
{
    PyObject *table;
    ShardsDir directory;
    const char *names, *missed;
    const uint8_t *groups;
    Py_ssize_t names_nbytes, groups_nbytes, count, num_ranks, num_errors = 0;
    size_t longest = 0;
    if (!PyArg_ParseTuple(args, "yy#y#y#O!n:probe_chunks", &directory.path, &names, &names_nbytes, &groups,
                          &groups_nbytes, &missed, &count, &PyTuple_Type, &table, &num_ranks))
        return NULL;
    bool fit = names_nbytes == count * NAME && groups_nbytes == count && num_ranks > 0;
    for (Py_ssize_t i = 0; fit && i < count; i++)
        fit = groups[i] < PyTuple_GET_SIZE(table) / num_ranks;
    if (!fit)
        return PyErr_Format(PyExc_ValueError, "probe_chunks: names, groups, missed_before and files do not fit");
    RankFile *files = take_files(table, &longest);
    directory.path_nbytes = strlen(directory.path);
    char *path = files ? PyMem_Malloc(directory.path_nbytes + 1 + SHARD + 1 + NAME + longest + 1) : NULL;
    PyObject *found = path ? PyBytes_FromStringAndSize(NULL, count) : NULL, *result = NULL;
    if (found != NULL) {
        int first = 0;
        double seconds; /* of the disk: without the time that it takes to get the interpreter's lock back */
        Py_BEGIN_ALLOW_THREADS
        seconds = -monotonic_s();
        shards_open(&directory);
        for (Py_ssize_t i = 0; i < count; i++) {
            int answer = probe_chunk(&directory, files + groups[i] * num_ranks, (size_t)num_ranks, names + i * NAME,
                                     missed[i] != 0, path);
            PyBytes_AS_STRING(found)[i] = answer == 1;
            num_errors += answer < 0;
            first = first == 0 && answer < 0 ? -answer : first;
        }
        shards_close(&directory);
        seconds += monotonic_s();
        Py_END_ALLOW_THREADS
        result = Py_BuildValue("Nnid", found, num_errors, first, seconds);
    } else if (!PyErr_Occurred()) {
        PyErr_NoMemory();
    }
    PyMem_Free(path);
    PyMem_Free(files);
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

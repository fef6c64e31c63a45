/* Chunk files seen from outside: are they there, and when were they used last? The interpreter's lock is released for
 * a whole batch, since threads may hang with the mount; meanwhile only immutable objects are read, which the arguments
 * refer to.
 *
 * Names are those of docs/format.md, "Names of chunk files": `<directory>/<3 hex>/<32 hex><suffix>`. All of their
 * pieces come from fskv.namespace.
 */
#define _GNU_SOURCE
#include "types.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Where shards are. `fd` makes a look 1.6 times faster than a whole path (ext4, 9 components: 1180 against 745
 * thousand a second; statx with a narrow mask gained nothing); -1: whole paths. */
typedef struct {
    const char *path;
    size_t path_nbytes;
    int fd;
} ShardsDir;

/* One rank's file of a group. */
typedef struct {
    const char *suffix;
    size_t suffix_nbytes;
    int64_t nbytes;
} RankFile;

static bool not_there(int error)
{
    /* Whatever the permissions of one directory are, the root answers. */
    return error == ENOENT || error == ENOTDIR || error == EACCES || error == EPERM;
}

static int probe_file(const ShardsDir *directory, int64_t nbytes, const char *path)
{
    struct stat info;
    int fd = directory->fd;
    const char *below = path + directory->path_nbytes + 1;
    for (int attempt = 0; attempt < 2; attempt++) {
        int result = fd >= 0 ? fstatat(fd, below, &info, AT_SYMLINK_NOFOLLOW) : lstat(path, &info);
        if (result == 0)
            return S_ISREG(info.st_mode) && info.st_size == nbytes;
        if (not_there(errno))
            return 0;
        if (errno != ESTALE)
            return -errno;
        fd = -1; /* a handle the server dropped, maybe that of our own descriptor: once more, from the top */
    }
    return 0;
}

/* Look whether all of a chunk's files are there with their sizes: 1, 0, or the negative errno of the first that
 * cannot be looked at. `missed_before`: see fskv.index.presence.probe_chunks. `path` has room for the longest path
 * and a zero: path_nbytes + 37 + suffix_nbytes + 1. */
static int probe_chunk(const ShardsDir *directory, const RankFile *files, size_t num_files, const char name[NAME],
                       bool missed_before, char *path)
{
    char *at = path + directory->path_nbytes;
    memcpy(path, directory->path, directory->path_nbytes);
    *at++ = '/';
    memcpy(at, name, SHARD);
    at += SHARD;
    if (missed_before) {
        /* An NFS client hides another node's new file for 28 s after a miss, but not after its directory was
         * opened; and a new directory no sooner than the one above it was. Whatever goes wrong here, the look that
         * follows meets it again. */
        *at = 0;
        int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT)
            fd = open(directory->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (fd >= 0)
            close(fd);
    }
    *at++ = '/';
    memcpy(at, name, NAME);
    int answer = 1;
    for (size_t i = 0; i < num_files && answer == 1; i++) {
        memcpy(at + NAME, files[i].suffix, files[i].suffix_nbytes);
        at[NAME + files[i].suffix_nbytes] = 0;
        answer = probe_file(directory, files[i].nbytes, path);
    }
    return answer;
}

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
        directory.fd = open(directory.path, O_PATH | O_DIRECTORY | O_CLOEXEC);
        for (Py_ssize_t i = 0; i < count; i++) {
            int answer = probe_chunk(&directory, files + groups[i] * num_ranks, (size_t)num_ranks, names + i * NAME,
                                     missed[i] != 0, path);
            PyBytes_AS_STRING(found)[i] = answer == 1;
            num_errors += answer < 0;
            first = first == 0 && answer < 0 ? -answer : first;
        }
        if (directory.fd >= 0)
            close(directory.fd);
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

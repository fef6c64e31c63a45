#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

void shards_open(ShardsDir *directory)
{
    directory->fd = open(directory->path, O_PATH | O_DIRECTORY | O_CLOEXEC);
}

void shards_close(ShardsDir *directory)
{
    if (directory->fd >= 0)
        close(directory->fd);
    directory->fd = -1;
}

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

int probe_chunk(const ShardsDir *directory, const RankFile *files, size_t num_files, const char name[NAME],
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

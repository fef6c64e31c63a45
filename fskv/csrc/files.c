#define _GNU_SOURCE
#include "files.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define MAX_NBYTES ((INT64_C(1) << 62) - 1)

_Static_assert(sizeof(ShardRecord) == 40, "the record is a format");

/* --- are they there ------------------------------------------------------------------------ */

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

static int probe_file(const RankFile *file, const char *path)
{
    struct stat info;
    int fd = file->directory->fd;
    const char *below = path + file->directory->path_nbytes + 1;
    for (int attempt = 0; attempt < 2; attempt++) {
        int result = fd >= 0 ? fstatat(fd, below, &info, AT_SYMLINK_NOFOLLOW) : lstat(path, &info);
        if (result == 0)
            return S_ISREG(info.st_mode) && info.st_size == file->nbytes;
        if (not_there(errno))
            return 0;
        if (errno != ESTALE)
            return -errno;
        fd = -1; /* a handle the server dropped, maybe that of our own descriptor: once more, from the top */
    }
    return 0;
}

int probe_chunk(const RankFile *files, size_t num_files, const char name[NAME], bool missed_before, char *path)
{
    const ShardsDir *written = NULL;
    for (size_t i = 0; i < num_files; i++) {
        const RankFile *file = &files[i];
        char *at = path + file->directory->path_nbytes;
        if (file->directory != written) {
            written = file->directory;
            memcpy(path, written->path, written->path_nbytes);
            *at = '/';
            memcpy(at + 1, name, SHARD);
        }
        at += 1 + SHARD;
        if (missed_before && i == 0) {
            /* An NFS client hides another node's new file for 28 s after a miss, but not after its directory
             * was opened; and a new directory no sooner than the one above it was. Whatever goes wrong here, the
             * look that follows meets it again. */
            *at = 0;
            int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (fd < 0 && errno == ENOENT)
                fd = open(written->path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            if (fd >= 0)
                close(fd);
        }
        *at++ = '/';
        memcpy(at, name, NAME);
        memcpy(at + NAME, file->suffix, file->suffix_nbytes);
        at[NAME + file->suffix_nbytes] = 0;
        int answer = probe_file(file, path);
        if (answer != 1)
            return answer;
    }
    return 1;
}

/* --- what stands in a shard ------------------------------------------------------------------ */

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Read a decimal of at most 6 digits without leading zeros; NULL if there is none. */
static const char *read_index(const char *at, uint32_t *value)
{
    const char *start = at;
    for (*value = 0; *at >= '0' && *at <= '9' && at - start < 6; at++)
        *value = 10 * *value + (uint32_t)(*at - '0');
    return at == start || (*start == '0' && at - start > 1) ? NULL : at;
}

static bool parse_name(const char *name, const char *shard, ShardRecord *record)
{
    if (strncmp(name, shard, SHARD) != 0)
        return false;
    for (int i = 0; i < 16; i++) {
        int high = hex_digit(name[2 * i]), low = high < 0 ? -1 : hex_digit(name[2 * i + 1]);
        if (low < 0)
            return false;
        record->digest[i] = (uint8_t)(high << 4 | low);
    }
    const char *at = name + NAME;
    if (strncmp(at, ".g", 2) != 0 || (at = read_index(at + 2, &record->group)) == NULL)
        return false;
    record->rank_and_1 = 0;
    if (strncmp(at, ".r", 2) == 0) {
        if ((at = read_index(at + 2, &record->rank_and_1)) == NULL)
            return false;
        record->rank_and_1++;
    }
    return strcmp(at, ".kv") == 0;
}

static bool add_record(Shard *shard, const ShardRecord *record)
{
    if (shard->num_records == shard->room_records) {
        size_t room = shard->room_records ? 2 * shard->room_records : 64;
        ShardRecord *records = realloc(shard->records, room * sizeof *records);
        if (records == NULL)
            return false;
        shard->records = records;
        shard->room_records = room;
    }
    shard->records[shard->num_records++] = *record;
    return true;
}

static bool add_other(Shard *shard, char kind, const char *name)
{
    size_t nbytes = strlen(name) + 2;
    if (shard->others_nbytes + nbytes > shard->room_others) {
        size_t room = 2 * shard->room_others + 1024;
        char *others = realloc(shard->others, room);
        if (others == NULL)
            return false;
        shard->others = others;
        shard->room_others = room;
    }
    char *at = shard->others + shard->others_nbytes;
    *at = kind;
    memcpy(at + 1, name, nbytes - 1);
    shard->others_nbytes += nbytes;
    return true;
}

/* In nanoseconds; what 64 bits cannot hold becomes the end of their range. Files may say they are of any year. */
static int64_t mtime_of(const struct stat *info)
{
    int64_t ns;
    if (__builtin_mul_overflow((int64_t)info->st_mtim.tv_sec, (int64_t)1000000000, &ns)
        || __builtin_add_overflow(ns, (int64_t)info->st_mtim.tv_nsec, &ns))
        return info->st_mtim.tv_sec < 0 ? INT64_MIN : INT64_MAX;
    return ns;
}

/* As fskv/root/filesystem.py: a number that cannot be true is none, and sums of them stay far from 2^63. */
static uint64_t clamped(int64_t nbytes)
{
    return nbytes < 0 ? 0 : nbytes > MAX_NBYTES ? MAX_NBYTES : (uint64_t)nbytes;
}

static uint64_t block_nbytes(const struct stat *info)
{
    int64_t blocks = info->st_blocks;
    return blocks > 0 && blocks <= MAX_NBYTES / 512 ? (uint64_t)blocks * 512 : 0;
}

static bool add_entry(Shard *shard, int fd, const char *shard_name, const char *name,
                      int64_t young_ns, int64_t newest_ns)
{
    struct stat info;
    int failed = fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) == 0 ? 0 : errno;
    if (failed == ENOENT)
        return true; /* gone meanwhile */
    ShardRecord record;
    if (failed || !S_ISREG(info.st_mode) || shard_name == NULL
        || !parse_name(name, shard_name, &record)) {
        char kind = failed                  ? '?'
                    : S_ISREG(info.st_mode) ? 'f'
                    : S_ISDIR(info.st_mode) ? 'd'
                    : S_ISLNK(info.st_mode) ? 'l'
                                            : '?';
        return add_other(shard, kind, name);
    }
    record.mtime_ns = mtime_of(&info);
    if (record.mtime_ns > newest_ns)
        record.mtime_ns = 0;
    uint64_t on_disk = block_nbytes(&info), length = clamped(info.st_size);
    /* By its change, and not by its last use, which a store sets back. */
    bool growing = (int64_t)info.st_ctim.tv_sec > young_ns / 1000000000 && on_disk < length;
    record.disk_nbytes = growing || on_disk == 0 ? length : on_disk;
    return add_record(shard, &record) && (!growing || add_other(shard, 'y', name));
}

/* The last component of a path when it is the name of a shard, else NULL: then no file in it is in its place. */
static const char *shard_name(const char *path)
{
    const char *name = strrchr(path, '/');
    name = name == NULL ? path : name + 1;
    for (int i = 0; i < SHARD; i++)
        if (hex_digit(name[i]) < 0)
            return NULL;
    return name[SHARD] == 0 ? name : NULL;
}

int shard_list(const char *path, int64_t young_ns, int64_t newest_ns, Shard *shard)
{
    *shard = (Shard){0};
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    DIR *directory = fd < 0 ? NULL : fdopendir(fd);
    if (directory == NULL) {
        int failed = errno;
        if (fd >= 0)
            close(fd);
        return failed;
    }
    const char *own_name = shard_name(path);
    int error = 0;
    while (error == 0) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (entry == NULL) {
            error = errno;
            break;
        }
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            continue;
        if (!add_entry(shard, fd, own_name, name, young_ns, newest_ns))
            error = ENOMEM;
    }
    closedir(directory);
    return error;
}

void shard_free(Shard *shard)
{
    free(shard->records);
    free(shard->others);
    *shard = (Shard){0};
}

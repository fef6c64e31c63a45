#define _GNU_SOURCE
#include "chunk_io.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "xxh3.h"

enum { PREFIX = 32, CHECKSUM_AT = 24, MAX_BACK_MS = 60000, FAR_S = 3600 };
static const int64_t SECOND = 1000000000; /* ns */

static const uint8_t MAGIC[8] = {0x89, 'F', 'S', 'K', 'V', '\r', '\n', 0x1a};

double realtime_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

size_t num_rows(size_t nbytes) { return (nbytes + ROW - 1) / ROW; }

size_t rows_field_nbytes(const FileLayout *layout)
{
    size_t rows = num_rows(layout->payload_nbytes);
    return layout->sealed.keys == NULL ? 8 * rows : SEAL + TAG * rows;
}

void digest_rows(const uint8_t *data, size_t nbytes, uint8_t *digests)
{
    for (size_t at = 0; at < nbytes; at += ROW, digests += 8) {
        size_t length = nbytes - at < ROW ? nbytes - at : ROW;
        uint64_t digest = __builtin_bswap64(xxh3_64(data + at, length));
        memcpy(digests, &digest, 8);
    }
}

/* --- the header -------------------------------------------------------------------------- */

static uint8_t *put(uint8_t *at, const void *bytes, size_t nbytes)
{
    memcpy(at, bytes, nbytes);
    return at + nbytes;
}

/* msgpack, the shortest form as msgpack-python writes it */
static size_t pack_uint(uint8_t out[5], uint32_t value)
{
    if (value < 0x80) {
        out[0] = (uint8_t)value;
        return 1;
    }
    if (value < 0x100) {
        out[0] = 0xcc;
        out[1] = (uint8_t)value;
        return 2;
    }
    if (value < 0x10000) {
        out[0] = 0xcd;
        out[1] = (uint8_t)(value >> 8);
        out[2] = (uint8_t)value;
        return 3;
    }
    uint32_t big = __builtin_bswap32(value);
    out[0] = 0xce;
    memcpy(out + 1, &big, 4);
    return 5;
}

static uint64_t header_checksum(uint8_t *header, size_t nbytes)
{
    memset(header + CHECKSUM_AT, 0, 8);
    return xxh3_64(header, nbytes);
}

uint8_t *row_digests_in(const FileLayout *layout, const ChunkFile *file, uint8_t *slot)
{
    uint8_t first[5];
    return slot + PREFIX + layout->head_nbytes + 2 + file->key_nbytes + layout->middle_nbytes +
           pack_uint(first, file->first_block) + layout->rows_nbytes;
}

/* Encrypt or decrypt rows of the slot in place; `seal` is in its header. False: they are spoilt. */
static bool crypt_slot(const FileLayout *layout, const ChunkFile *file, uint32_t first_block, uint8_t *slot,
                       size_t start, size_t stop, uint8_t *seal, bool encrypt)
{
    RowsOf of = layout->sealed;
    of.key = file->key;
    of.key_nbytes = file->key_nbytes;
    of.first_block = first_block;
    size_t first_row = (start - layout->header_nbytes) / ROW;
    return crypt_rows(&of, slot + start, stop - start, first_row, seal, encrypt) == (ssize_t)num_rows(stop - start);
}

/* Encrypt the payload of a store; or decrypt that of a file which was not written: a second encryption of it would be
 * served as KV. */
static bool crypt_payload(const FileLayout *layout, const ChunkFile *file, uint8_t *slot, bool encrypt)
{
    return crypt_slot(layout, file, file->first_block, slot, layout->header_nbytes,
                      layout->header_nbytes + layout->payload_nbytes, row_digests_in(layout, file, slot), encrypt);
}

/* Zero what is not content, then put the digests in their place, or encrypt. False: the payload is spoilt. */
static bool digest_payload(const FileLayout *layout, const ChunkFile *file, uint8_t *slot)
{
    uint8_t *payload = slot + layout->header_nbytes;
    memset(payload, 0, file->first_block * layout->block_nbytes);
    memset(payload + layout->content_nbytes, 0, layout->payload_nbytes - layout->content_nbytes);
    if (layout->sealed.keys != NULL)
        return crypt_payload(layout, file, slot, true);
    digest_rows(payload, layout->payload_nbytes, row_digests_in(layout, file, slot));
    return true;
}

/* Write the header around the digests, which are in their place. The caller has checked that the pieces fit into
 * header_nbytes. */
static void write_header(const FileLayout *layout, const ChunkFile *file, uint8_t *slot)
{
    uint8_t *payload = slot + layout->header_nbytes, *at = slot + PREFIX, first[5], written[9];
    at = put(at, layout->head, layout->head_nbytes);
    *at++ = 0xc4; /* bin8 */
    *at++ = (uint8_t)file->key_nbytes;
    at = put(at, file->key, file->key_nbytes);
    at = put(at, layout->middle, layout->middle_nbytes);
    at = put(at, first, pack_uint(first, file->first_block));
    at = put(at, layout->rows, layout->rows_nbytes);
    at += rows_field_nbytes(layout);
    at = put(at, layout->tail, layout->tail_nbytes);
    uint64_t now_ms = __builtin_bswap64((uint64_t)(realtime_s() * 1000));
    written[0] = 0xcf; /* uint64 */
    memcpy(written + 1, &now_ms, 8);
    at = put(at, written, sizeof written);
    memset(at, 0, (size_t)(payload - at));

    uint32_t prefix[4] = {layout->format_version, (uint32_t)layout->header_nbytes,
                          (uint32_t)(at - slot - PREFIX), 0};
    memcpy(slot, MAGIC, sizeof MAGIC);
    memcpy(slot + 8, prefix, sizeof prefix);
    uint64_t checksum = header_checksum(slot, layout->header_nbytes);
    memcpy(slot + CHECKSUM_AT, &checksum, 8);
}

static bool take(const uint8_t **at, const uint8_t *end, const void *bytes, size_t nbytes)
{
    if ((size_t)(end - *at) < nbytes || memcmp(*at, bytes, nbytes) != 0)
        return false;
    *at += nbytes;
    return true;
}

/* A text that the Python reader takes too: ASCII, as fixstr or str 8. */
static bool take_text(const uint8_t **at, const uint8_t *end)
{
    size_t room = (size_t)(end - *at), head, nbytes;
    if (room >= 1 && ((*at)[0] & 0xe0) == 0xa0) {
        head = 1;
        nbytes = (*at)[0] & 0x1f;
    } else if (room >= 2 && (*at)[0] == 0xd9) {
        head = 2;
        nbytes = (*at)[1];
    } else {
        return false;
    }
    if (room - head < nbytes)
        return false;
    uint8_t seen = 0;
    for (size_t i = 0; i < nbytes; i++)
        seen |= (*at)[head + i];
    *at += head + nbytes;
    return seen < 0x80;
}

/* A uint 64 of at most 2^62. */
static bool take_time(const uint8_t **at, const uint8_t *end)
{
    uint64_t value;
    if (end - *at < 9 || (*at)[0] != 0xcf)
        return false;
    memcpy(&value, *at + 1, sizeof value);
    *at += 9;
    return __builtin_bswap64(value) <= UINT64_C(1) << 62;
}

static bool all_zero(const uint8_t *at, const uint8_t *end)
{
    size_t nbytes = (size_t)(end - at);
    return nbytes == 0 || (*at == 0 && memcmp(at, at + 1, nbytes - 1) == 0);
}

/* What follows the digests: whoever's creator, any time, the end of the map, and zeros. */
static bool check_tail(const uint8_t *at, const uint8_t *end, const uint8_t *payload)
{
    static const char creator[] = "\xa7" "creator", written_at[] = "\xaa" "written_at";
    return take(&at, end, creator, sizeof creator - 1) && take_text(&at, end) &&
           take(&at, end, written_at, sizeof written_at - 1) && take_time(&at, end) && at == end &&
           all_zero(end, payload);
}

/* Return the digests of a header that is, byte for byte, the one this chunk should have; else NULL. Only its first
 * block, creator and written_at may be others. What passes here the Python reader would take too; a sound header that
 * is encoded in another way, say with its fields in another order, is left to it. */
static uint8_t *check_header(const FileLayout *layout, const ChunkFile *file, uint8_t *slot, uint32_t *first_block)
{
    uint32_t prefix[4];
    uint64_t checksum;
    memcpy(prefix, slot + 8, sizeof prefix);
    memcpy(&checksum, slot + CHECKSUM_AT, 8);
    if (memcmp(slot, MAGIC, sizeof MAGIC) != 0 || prefix[0] != layout->format_version ||
        prefix[1] != layout->header_nbytes || prefix[2] > layout->header_nbytes - PREFIX ||
        prefix[3] != 0 || header_checksum(slot, layout->header_nbytes) != checksum)
        return NULL;

    const uint8_t *at = slot + PREFIX, *end = at + prefix[2];
    uint8_t key_head[2] = {0xc4, (uint8_t)file->key_nbytes}, first[5];
    if (!take(&at, end, layout->head, layout->head_nbytes) || !take(&at, end, key_head, 2) ||
        !take(&at, end, file->key, file->key_nbytes) ||
        !take(&at, end, layout->middle, layout->middle_nbytes))
        return NULL;
    /* Any first_block that does not reach into the wanted blocks will do. */
    bool found = false;
    for (uint32_t b = 0; b <= file->first_block && !found; b++) {
        found = take(&at, end, first, pack_uint(first, b));
        *first_block = b;
    }
    size_t digests_nbytes = rows_field_nbytes(layout);
    if (!found || !take(&at, end, layout->rows, layout->rows_nbytes) ||
        (size_t)(end - at) < digests_nbytes ||
        !check_tail(at + digests_nbytes, end, slot + layout->header_nbytes))
        return NULL;
    return (uint8_t *)at; /* in the slot, which the caller may change */
}

/* Check the rows from `start` to `stop` of the slot, and decrypt them in place. */
static bool check_rows(const FileLayout *layout, const ChunkFile *file, uint32_t first_block, uint8_t *slot,
                       size_t start, size_t stop, uint8_t *digests)
{
    size_t first_row = (start - layout->header_nbytes) / ROW;
    if (layout->sealed.keys != NULL)
        return crypt_slot(layout, file, first_block, slot, start, stop, digests, false);
    bool good = true;
    for (size_t at = start, row = first_row; good && at < stop; at += ROW, row++) {
        uint8_t digest[8];
        digest_rows(slot + at, stop - at < ROW ? stop - at : ROW, digest);
        good = memcmp(digest, digests + 8 * row, 8) == 0;
    }
    return good;
}

/* --- files ------------------------------------------------------------------------------- */

/* Either way off: a clock that is behind the file server's sees what is new in the future, for as long. */
static bool wants_touch(const FileLayout *layout, const struct stat *info)
{
    double mtime_s = (double)info->st_mtim.tv_sec + 1e-9 * (double)info->st_mtim.tv_nsec;
    return fabs(realtime_s() - mtime_s) > layout->touch_interval_s;
}

/* The mtime in ns, 0 where it is none that can be: files may say they are of any year. */
static int64_t sane_mtime_ns(const struct stat *info)
{
    bool sane = info->st_mtim.tv_sec > MAX_BACK_MS / 1000 && info->st_mtim.tv_sec < INT64_MAX / SECOND;
    return sane ? info->st_mtim.tv_sec * SECOND + info->st_mtim.tv_nsec : 0;
}

static int64_t back_ns(uint32_t depth)
{
    return (depth < MAX_BACK_MS ? depth : MAX_BACK_MS) * (SECOND / 1000);
}

/* Whether a file is older than in a use, or of a time that is still to come. */
static bool wants_stamp(int64_t own, int64_t use, int64_t wanted)
{
    return own < wanted || own > use + FAR_S * SECOND;
}

static bool wants_use(const ChunkFile *file, const struct stat *info)
{
    int64_t use = __atomic_load_n(file->use_ns, __ATOMIC_RELAXED);
    return use == 0 || wants_stamp(sane_mtime_ns(info), use, use - back_ns(file->depth));
}

static int set_times(int fd, const char *name, const struct timespec *times)
{
    return name ? utimensat(fd, name, times, AT_SYMLINK_NOFOLLOW) : futimens(fd, times);
}

void stamp_use(int fd, const char *name, int64_t *use_ns, uint32_t depth, bool fresh)
{
    struct stat info;
    int64_t use = __atomic_load_n(use_ns, __ATOMIC_RELAXED);
    if (!fresh && use == 0)
        fresh = set_times(fd, name, NULL) == 0;
    if ((name ? fstatat(fd, name, &info, AT_SYMLINK_NOFOLLOW) : fstat(fd, &info)) != 0)
        return;
    int64_t own = sane_mtime_ns(&info);
    if (fresh && own != 0 && use == 0 &&
        __atomic_compare_exchange_n(use_ns, &use, own, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        use = own; /* else it is what another thread has put there */
    if (use == 0 || (fresh && own == 0))
        return;
    /* Also later than it was written: another thread may have stamped the use since. */
    int64_t wanted = (fresh && own < use - FAR_S * SECOND ? own : use) - back_ns(depth);
    struct timespec times[2] = {{.tv_nsec = UTIME_OMIT},
                                {.tv_sec = wanted / SECOND, .tv_nsec = wanted % SECOND}};
    if (fresh ? wanted != own : wants_stamp(own, use, wanted))
        if (set_times(fd, name, times) != 0 && !fresh)
            (void)set_times(fd, name, NULL);
}

static bool good_file_there(const FileLayout *layout, const ChunkFile *file, int directory, const char *name)
{
    struct stat info;
    if (fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISREG(info.st_mode) ||
        (size_t)info.st_size != layout->header_nbytes + layout->payload_nbytes)
        return false;
    if (file->use_ns != NULL)
        stamp_use(directory, name, file->use_ns, file->depth, false);
    else if (wants_touch(layout, &info))
        (void)utimensat(directory, name, NULL, AT_SYMLINK_NOFOLLOW);
    return true;
}

static bool write_all(const FileLayout *layout, int fd, const uint8_t *data, size_t nbytes)
{
    for (size_t done = 0; done < nbytes;) {
        ssize_t wrote = pwrite(fd, data + done, nbytes - done, (off_t)done);
        if (wrote < 0 && errno == EINTR)
            continue;
        /* A full file system may take a part; with O_DIRECT the rest would not be aligned. */
        if (wrote <= 0 || (layout->open_flags && wrote % 4096))
            return false;
        done += (size_t)wrote;
    }
    return true;
}

static bool read_all(int fd, uint8_t *slot, size_t start, size_t stop)
{
    while (start < stop) {
        ssize_t got = pread(fd, slot + start, stop - start, (off_t)start);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            return false;
        start += (size_t)got;
    }
    return true;
}

/* --- directories ---------------------------------------------------------------------------- */

/* As in <linux/openat2.h>, which older systems lack: since Linux 5.6, the same number everywhere. */
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
struct how {
    uint64_t flags, mode, resolve;
};
enum { NO_SYMLINKS = 0x04 };

static bool is_link(int directory, const char *name)
{
    struct stat info;
    return fstatat(directory, name, &info, AT_SYMLINK_NOFOLLOW) == 0 && S_ISLNK(info.st_mode);
}

/* Whether a kernel or a sandbox may refuse openat2 itself: sandboxes answer as they are told to. Where it is the
 * directory that was refused, the walk is refused too. */
static bool is_refused(int error)
{
    return error == ENOSYS || error == EPERM || error == EACCES || error == EINVAL || error == EOPNOTSUPP;
}

/* One name after the other: five calls for one. */
static int walk(int root, const char *below, int flags)
{
    int at = root;
    for (;;) {
        size_t nbytes = strcspn(below, "/");
        char name[NAME_MAX + 1];
        if (nbytes > NAME_MAX) {
            errno = ENAMETOOLONG;
            break;
        }
        memcpy(name, below, nbytes);
        name[nbytes] = '\0';
        bool last = below[nbytes] == '\0';
        int fd = openat(at, name, (last ? flags : O_PATH) | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
        if (fd < 0 && errno == ENOTDIR)
            errno = is_link(at, name) ? ELOOP : ENOTDIR;
        int failed = errno;
        if (at != root)
            close(at);
        errno = failed;
        if (last || fd < 0)
            return fd;
        at = fd;
        below += nbytes + 1;
    }
    int failed = errno;
    if (at != root)
        close(at);
    errno = failed;
    return -1;
}

int open_beneath(const char *path, size_t root_nbytes, size_t nbytes, int flags)
{
    char copy[PATH_MAX];
    if (nbytes >= sizeof copy) {
        errno = ENAMETOOLONG;
        return -1;
    }
    memcpy(copy, path, nbytes);
    copy[nbytes] = '\0';
    flags |= O_DIRECTORY | O_CLOEXEC;
    if (root_nbytes >= nbytes)
        return open(nbytes ? copy : "/", flags);
    struct how how = {.flags = (uint64_t)flags, .resolve = NO_SYMLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, copy, &how, sizeof how);
    if (fd >= 0 || (errno != ELOOP && !is_refused(errno)))
        return fd;
    /* There is a link, which may be the root's; or openat2 is refused. */
    copy[root_nbytes] = '\0';
    int root = open(root_nbytes ? copy : "/", O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (root < 0)
        return -1;
    /* Relative, however many slashes there are: an absolute path would lead out of the root. */
    const char *below = copy + root_nbytes + strspn(copy + root_nbytes + 1, "/") + 1;
    if (*below == '\0')
        below = ".";
    fd = (int)syscall(SYS_openat2, root, below, &how, sizeof how);
    if (fd < 0 && is_refused(errno))
        fd = walk(root, below, flags);
    int failed = errno;
    close(root);
    errno = failed;
    return fd;
}

/* The last component of a path, and the length of what is before its slash. */
static const char *name_in(const char *path, size_t *parent_nbytes)
{
    const char *slash = strrchr(path, '/');
    *parent_nbytes = slash == NULL ? 0 : (size_t)(slash - path);
    return slash == NULL ? path : slash + 1;
}

/* The directory of a chunk file; -1 and errno. */
static int open_parent(const FileLayout *layout, const char *path)
{
    size_t nbytes;
    (void)name_in(path, &nbytes);
    return open_beneath(path, layout->root_nbytes, nbytes, O_PATH);
}

/* Make and open it. One level only, as fskv.root.beneath.make_directory: with the root gone nothing may be made in its
 * place. */
static int make_parent(const FileLayout *layout, const char *path)
{
    char parent[PATH_MAX];
    size_t nbytes, above_nbytes;
    struct stat info;
    (void)name_in(path, &nbytes);
    if (nbytes >= sizeof parent)
        return -1;
    memcpy(parent, path, nbytes);
    parent[nbytes] = '\0';
    const char *name = name_in(parent, &above_nbytes);
    int above = open_beneath(parent, layout->root_nbytes, above_nbytes, O_PATH);
    if (above < 0)
        return -1;
    bool made = mkdirat(above, name, layout->dir_mode) == 0;
    int fd = openat(above, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    close(above);
    if (made && fd >= 0 && fstat(fd, &info) == 0)
        (void)fchmod(fd, layout->dir_mode | (info.st_mode & S_ISGID));
    return fd;
}

/* Opens the directory too, where it was not there. */
static int open_part(const FileLayout *layout, const ChunkFile *file, int *directory)
{
    size_t parent_nbytes;
    const char *name = name_in(file->part, &parent_nbytes);
    int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW | layout->open_flags;
    int fd = *directory < 0 ? -1 : openat(*directory, name, flags, layout->file_mode);
    if (fd < 0 && (*directory < 0 || errno == ENOENT)) {
        if (*directory >= 0)
            close(*directory);
        *directory = make_parent(layout, file->part);
        if (*directory >= 0)
            fd = openat(*directory, name, flags, layout->file_mode);
    }
    if (fd >= 0 && (layout->file_mode & 077) != 0)
        (void)fchmod(fd, layout->file_mode); /* a group is let in whatever the umask */
    return fd;
}

static ChunkResult publish(const FileLayout *layout, const ChunkFile *file, uint8_t *slot, int *directory)
{
    size_t parent_nbytes;
    const char *name = name_in(file->path, &parent_nbytes);
    int fd = open_part(layout, file, directory);
    if (fd < 0)
        return CHUNK_OTHERWISE;
    const char *part = name_in(file->part, &parent_nbytes);
    bool good = write_all(layout, fd, slot, layout->header_nbytes + layout->payload_nbytes) &&
                (!layout->fsync || fsync(fd) == 0);
    good = close(fd) == 0 && good; /* NFS may report a failed write only here */
    if (good && renameat(*directory, part, *directory, name) == 0) {
        if (layout->touch)
            (void)utimensat(*directory, name, NULL, AT_SYMLINK_NOFOLLOW);
        if (file->use_ns != NULL)
            stamp_use(*directory, name, file->use_ns, file->depth, true);
        return CHUNK_OK;
    }
    (void)unlinkat(*directory, part, 0);
    return CHUNK_OTHERWISE;
}

static ChunkResult write_in(const FileLayout *layout, const ChunkFile *file, uint8_t *slot,
                            bool digested, int *directory)
{
    size_t parent_nbytes;
    const char *name = name_in(file->path, &parent_nbytes);
    if (!file->replace && *directory >= 0 && good_file_there(layout, file, *directory, name))
        return CHUNK_EXISTS;
    if (!digested && !digest_payload(layout, file, slot))
        return CHUNK_SPOILT;
    write_header(layout, file, slot);
    ChunkResult result = publish(layout, file, slot, directory);
    if (result != CHUNK_OK && layout->sealed.keys != NULL && !crypt_payload(layout, file, slot, false))
        return CHUNK_SPOILT;
    return result;
}

ChunkResult chunk_write(const FileLayout *layout, const ChunkFile *file, uint8_t *slot,
                        bool digested)
{
    int directory = open_parent(layout, file->path);
    ChunkResult result = write_in(layout, file, slot, digested, &directory);
    if (directory >= 0)
        close(directory);
    return result;
}

ChunkResult chunk_read(const FileLayout *layout, const ChunkFile *file, uint8_t *slot, int *open_fd,
                       int *old_mtime)
{
    struct stat info;
    size_t file_nbytes = layout->header_nbytes + layout->payload_nbytes;
    /* The rows of the wanted blocks, and the padding with the last block: FileLayout.rows_of_blocks. */
    uint32_t last = file->first_block + file->num_blocks;
    size_t first_row = file->first_block * layout->block_nbytes / ROW;
    size_t content_stop =
        last == layout->num_blocks ? layout->payload_nbytes : last * layout->block_nbytes;
    size_t start = layout->header_nbytes + first_row * ROW;
    size_t stop = layout->header_nbytes + num_rows(content_stop) * ROW;
    if (stop > file_nbytes)
        stop = file_nbytes;

    size_t parent_nbytes;
    const char *name = name_in(file->path, &parent_nbytes);
    int directory = open_parent(layout, file->path);
    if (directory < 0)
        return CHUNK_OTHERWISE;
    int fd = openat(directory, name,
                    O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK | layout->open_flags);
    close(directory);
    if (fd < 0)
        return CHUNK_OTHERWISE;
    bool good = fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && (size_t)info.st_size == file_nbytes;
    /* One large transfer beats two, also when it reads some rows that are not needed. */
    if (good && 2 * (stop - start) >= layout->payload_nbytes)
        good = read_all(fd, slot, 0, stop);
    else if (good)
        good = read_all(fd, slot, 0, layout->header_nbytes) && read_all(fd, slot, start, stop);

    uint32_t first_block;
    uint8_t *digests = good ? check_header(layout, file, slot, &first_block) : NULL;
    if (digests == NULL || !check_rows(layout, file, first_block, slot, start, stop, digests)) {
        close(fd);
        return CHUNK_OTHERWISE;
    }
    *old_mtime = file->use_ns != NULL ? wants_use(file, &info) : wants_touch(layout, &info);
    *open_fd = fd;
    return CHUNK_OK;
}

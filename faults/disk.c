/* TEST SHIM, never part of the product: makes the disk fail below every transport.
 *
 * Loaded by LD_PRELOAD into a child process of the tests, it stands between libc and whoever calls it: the
 * interpreter, a C extension, libkvikio. It acts on paths below FSKV_DISK_FAULTS_DIR only (fds by the path that
 * /proc/self/fd gives) and does what the control file FSKV_DISK_FAULTS_SCRIPT says; without rules for an
 * operation nothing but one stat of that file is added. faults/disk.py writes the control file and
 * documents its language.
 *
 * Invisible to it: mmap, io_uring, raw syscalls, and what libc calls inside itself (fopen's open).
 *
 * Threads: no lock at all. A script is parsed into a snapshot that never changes but for its atomic counters and is
 * published by one compare-and-swap; snapshots are never freed, a test has few. Nothing is held while a call hangs or
 * while the real call runs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include <utime.h>

#define MAX_RULES 64
#define MAX_IDS 1000
#define POLL_MS 20
#define LONGEST_HANG_MS 60000

enum op { OPEN, READ, PREAD, WRITE, PWRITE, FSTAT, STAT, RENAME, UNLINK, FSYNC, MKDIR, UTIME, TRUNCATE, FALLOCATE, CLOSE,
          NUM_OPS };
static const char *const op_names[NUM_OPS] = {
    "open", "read", "pread", "write", "pwrite", "fstat", "stat", "rename", "unlink", "fsync", "mkdir", "utime",
    "truncate", "fallocate", "close"};

struct rule {
    enum op op;
    int error;      /* the errno to fail with, or 0 */
    int hang, flip, lost;
    long slow_ms, short_nbytes, after; /* short_nbytes -1: not given */
    long count;                        /* LONG_MAX: always */
    long long at;                      /* of flip: this file offset, or -1: the middle of each transfer */
    int has_budget;                    /* partial= was given */
    _Atomic long long budget;          /* bytes that still go through */
    _Atomic long matched;
    int id;                            /* place in the counter file, or -1 */
    char suffix[32];
};

struct script {
    struct { long long ino, mtime_s, mtime_ns, size; } key;
    unsigned ops; /* bit set of the operations that have a rule */
    int num_rules;
    struct rule rules[MAX_RULES];
};

/* Shared with faults/disk.py, which makes the file; it alone zeroes it. */
struct counters {
    _Atomic uint64_t attached, hanging, scripts, bad_lines;
    struct { _Atomic uint64_t matched, fired; } rule[MAX_IDS];
};

static char directory[PATH_MAX];
static size_t directory_len;
static const char *script_path;
static struct counters no_counters;
static struct counters *counters = &no_counters;
static struct script no_script;
static _Atomic(struct script *) current = &no_script;

static const struct { const char *name; int value; } errnos[] = {
#define E(name) {#name, name}
    E(EIO), E(ENOSPC), E(EDQUOT), E(ESTALE), E(ENOENT), E(ENOTDIR), E(EACCES), E(EPERM), E(EROFS), E(EINTR), E(EAGAIN),
    E(EINVAL), E(EBADF), E(EMFILE), E(ENFILE), E(ENOMEM), E(ETIMEDOUT), E(ENOTCONN), E(EREMOTEIO), E(EEXIST), E(EISDIR),
    E(ELOOP), E(EFBIG), E(EBUSY), E(EOPNOTSUPP), E(ENODEV), E(ENXIO), E(ENAMETOOLONG), E(EXDEV)
#undef E
};

__attribute__((constructor)) static void begin(void)
{
    const char *dir = getenv("FSKV_DISK_FAULTS_DIR");
    const char *count = getenv("FSKV_DISK_FAULTS_COUNTERS");
    if (count) {
        int fd = (int)syscall(SYS_openat, AT_FDCWD, count, O_RDWR | O_CLOEXEC);
        if (fd >= 0) {
            void *at = mmap(NULL, sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
            if (at != MAP_FAILED)
                counters = at;
            syscall(SYS_close, fd);
        }
    }
    if (dir && strlen(dir) < sizeof directory) {
        strcpy(directory, dir);
        directory_len = strlen(dir);
        script_path = getenv("FSKV_DISK_FAULTS_SCRIPT");
    }
    counters->attached++;
}

/* --- the script ------------------------------------------------------------------------------------------ */

static int parse_rule(char *line, struct rule *rule)
{
    char *rest = NULL, *word = strtok_r(line, " \t", &rest);
    memset(rule, 0, sizeof *rule);
    rule->short_nbytes = -1;
    rule->count = LONG_MAX;
    rule->at = -1;
    rule->id = -1;
    int op = 0;
    while (op < NUM_OPS && strcmp(word, op_names[op]))
        op++;
    if (op == NUM_OPS)
        return 0;
    rule->op = (enum op)op;
    while ((word = strtok_r(NULL, " \t", &rest))) {
        char *value = strchr(word, '=');
        if (value)
            *value++ = 0;
        if (!value && !strcmp(word, "hang")) rule->hang = 1;
        else if (!value && !strcmp(word, "flip")) rule->flip = 1;
        else if (!value && !strcmp(word, "lost")) rule->lost = 1;
        else if (!value) {
            for (size_t i = 0; i < sizeof errnos / sizeof *errnos; i++)
                if (!strcmp(word, errnos[i].name))
                    rule->error = errnos[i].value;
            if (!rule->error)
                return 0;
        }
        else if (!strcmp(word, "slow_ms")) rule->slow_ms = atol(value);
        else if (!strcmp(word, "short")) rule->short_nbytes = atol(value);
        else if (!strcmp(word, "partial")) { rule->has_budget = 1; rule->budget = atoll(value); }
        else if (!strcmp(word, "after")) rule->after = atol(value);
        else if (!strcmp(word, "count")) rule->count = strcmp(value, "*") ? atol(value) : LONG_MAX;
        else if (!strcmp(word, "at")) rule->at = atoll(value);
        else if (!strcmp(word, "id")) rule->id = atoi(value) < MAX_IDS ? atoi(value) : -1;
        else if (!strcmp(word, "suffix") && strlen(value) < sizeof rule->suffix) strcpy(rule->suffix, value);
        else return 0;
    }
    return 1;
}

static void parse(char *text, struct script *script)
{
    char *rest = NULL;
    for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        line += strspn(line, " \t");
        if (*line == '#' || !*line)
            continue;
        if (script->num_rules == MAX_RULES || !parse_rule(line, &script->rules[script->num_rules])) {
            counters->bad_lines++;
            continue;
        }
        script->ops |= 1u << script->rules[script->num_rules++].op;
    }
}

/* The script that the control file holds now. Raw syscalls: the shim must not meet itself. */
static struct script *load(void)
{
    if (!script_path)
        return &no_script;
    for (;;) {
        struct script *known = atomic_load(&current);
        struct stat info;
        if (syscall(SYS_newfstatat, AT_FDCWD, script_path, &info, 0))
            return &no_script; /* no control file, no faults */
        if (known->key.ino == (long long)info.st_ino && known->key.mtime_s == info.st_mtim.tv_sec &&
            known->key.mtime_ns == info.st_mtim.tv_nsec && known->key.size == info.st_size)
            return known;
        int fd = (int)syscall(SYS_openat, AT_FDCWD, script_path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return &no_script;
        char text[16384];
        ssize_t got = syscall(SYS_read, fd, text, sizeof text - 1);
        syscall(SYS_newfstatat, fd, "", &info, AT_EMPTY_PATH);
        syscall(SYS_close, fd);
        struct script *fresh = got < 0 ? NULL : calloc(1, sizeof *fresh);
        if (!fresh)
            return known;
        text[got] = 0;
        parse(text, fresh);
        fresh->key.ino = (long long)info.st_ino;
        fresh->key.mtime_s = info.st_mtim.tv_sec;
        fresh->key.mtime_ns = info.st_mtim.tv_nsec;
        fresh->key.size = info.st_size;
        if (atomic_compare_exchange_strong(&current, &known, fresh)) {
            counters->scripts++;
            return fresh;
        }
        free(fresh); /* another thread was faster; look again */
    }
}

static int below(const char *path)
{
    return directory_len && !strncmp(path, directory, directory_len) &&
           (path[directory_len] == '/' || !path[directory_len]);
}

static int ends_with(const char *path, const char *suffix)
{
    size_t p = strlen(path), s = strlen(suffix);
    return p >= s && !strcmp(path + p - s, suffix);
}

/* The rule that this call meets, or NULL. Counts the call; `other` is a second path (rename) or NULL. `start` and `stop`
 * are the file range of a transfer; a flip at a fixed offset only matches a transfer that covers it. */
static struct rule *decide(enum op op, const char *path, const char *other, long long start, long long stop)
{
    struct script *script = load();
    if (!(script->ops & 1u << op) || !(below(path) || (other && below(other))))
        return NULL;
    for (int i = 0; i < script->num_rules; i++) {
        struct rule *rule = &script->rules[i];
        if (rule->op != op || !(ends_with(path, rule->suffix) || (other && ends_with(other, rule->suffix))))
            continue;
        if (rule->flip && rule->at >= 0 && !(start <= rule->at && rule->at < stop))
            continue;
        long before = atomic_fetch_add(&rule->matched, 1);
        if (rule->id >= 0)
            counters->rule[rule->id].matched++;
        if (before < rule->after || before - rule->after >= rule->count)
            continue;
        return rule;
    }
    return NULL;
}

static int still_hangs(enum op op, const char *path, const char *other)
{
    struct script *script = load();
    for (int i = 0; i < script->num_rules; i++)
        if (script->rules[i].op == op && script->rules[i].hang &&
            (ends_with(path, script->rules[i].suffix) || (other && ends_with(other, script->rules[i].suffix))))
            return 1;
    return 0;
}

static void sleep_ms(long ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

static void fired(struct rule *rule)
{
    if (rule->id >= 0)
        counters->rule[rule->id].fired++;
}

/* Everything of a rule that comes before the real call; returns the errno to fail with, or 0. */
static int before_call(struct rule *rule, const char *path, const char *other)
{
    if (rule->slow_ms)
        sleep_ms(rule->slow_ms);
    if (rule->hang) {
        fired(rule);
        counters->hanging++;
        long waited = 0;
        for (; waited < LONGEST_HANG_MS && still_hangs(rule->op, path, other); waited += POLL_MS)
            sleep_ms(POLL_MS);
        counters->hanging--;
        if (waited >= LONGEST_HANG_MS)
            return ETIMEDOUT;
    } else if (rule->error || rule->slow_ms || rule->lost)
        fired(rule);
    return rule->error;
}

/* --- paths ------------------------------------------------------------------------------------------------ */

static int path_of_fd(int fd, char *path)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = syscall(SYS_readlink, link, path, PATH_MAX - 1);
    if (len <= 0)
        return 0;
    path[len] = 0;
    char *deleted = path + len - 10;
    if (len > 10 && !strcmp(deleted, " (deleted)"))
        *deleted = 0;
    return 1;
}

/* Lexically absolute, symbolic links are not resolved. */
static void absolute(int dir_fd, const char *path, char *full)
{
    full[0] = 0;
    if (!path)
        return;
    if (*path == '/') {
        snprintf(full, PATH_MAX, "%s", path);
        return;
    }
    char base[PATH_MAX] = "";
    if (dir_fd == AT_FDCWD)
        syscall(SYS_getcwd, base, sizeof base);
    else if (!path_of_fd(dir_fd, base))
        return;
    if (snprintf(full, PATH_MAX, *path ? "%s/%s" : "%s", base, path) >= PATH_MAX)
        full[0] = 0;
}

static int is_of_interest(enum op op)
{
    return script_path && (load()->ops & 1u << op);
}

/* The errno that a call on a path, two paths, or an fd fails with now, or 0. `lost`: pretend success. */
static int meet_path(enum op op, int dir_fd, const char *path, int other_fd, const char *other, int *lost)
{
    int kept = errno, error = 0;
    *lost = 0;
    if (is_of_interest(op)) {
        char full[PATH_MAX], full_other[PATH_MAX];
        absolute(dir_fd, path, full);
        absolute(other_fd, other, full_other);
        const char *second = other ? full_other : NULL;
        struct rule *rule = decide(op, full, second, 0, LLONG_MAX);
        if (rule) {
            error = before_call(rule, full, second);
            *lost = rule->lost;
        }
    }
    errno = error ? error : kept;
    return error;
}

static int meet_fd(enum op op, int fd, int *lost)
{
    int kept = errno, error = 0;
    *lost = 0;
    char path[PATH_MAX];
    if (is_of_interest(op) && path_of_fd(fd, path)) {
        struct rule *rule = decide(op, path, NULL, 0, LLONG_MAX);
        if (rule) {
            error = before_call(rule, path, NULL);
            *lost = rule->lost;
        }
    }
    errno = error ? error : kept;
    return error;
}

/* --- the real functions ----------------------------------------------------------------------------------- */

#define REAL(result, name, ...)                                             \
    static result (*real)(__VA_ARGS__);                                     \
    if (!real)                                                              \
        *(void **)&real = dlsym(RTLD_NEXT, #name)

/* A call on one path: fails, is lost, or goes through. */
#define PATH_CALL(result, name, op, dir, path, other_dir, other, parameters, arguments, ...) \
    result name parameters                                                  \
    {                                                                       \
        REAL(result, name, __VA_ARGS__);                                    \
        int lost;                                                           \
        if (meet_path(op, dir, path, other_dir, other, &lost))              \
            return -1;                                                      \
        return lost ? 0 : real arguments;                                   \
    }

#define FD_CALL(name, op, parameters, arguments, ...)                       \
    int name parameters                                                     \
    {                                                                       \
        REAL(int, name, __VA_ARGS__);                                       \
        int lost;                                                           \
        if (meet_fd(op, fd, &lost))                                         \
            return -1;                                                      \
        return lost ? 0 : real arguments;                                   \
    }

#define OPEN_CALL(name)                                                     \
    int name(const char *path, int flags, ...)                              \
    {                                                                       \
        REAL(int, name, const char *, int, ...);                            \
        va_list more;                                                       \
        va_start(more, flags);                                              \
        mode_t mode = __OPEN_NEEDS_MODE(flags) ? va_arg(more, mode_t) : 0;  \
        va_end(more);                                                       \
        int lost;                                                           \
        return meet_path(OPEN, AT_FDCWD, path, 0, NULL, &lost) ? -1 : real(path, flags, mode); \
    }

#define OPENAT_CALL(name)                                                   \
    int name(int dir, const char *path, int flags, ...)                     \
    {                                                                       \
        REAL(int, name, int, const char *, int, ...);                       \
        va_list more;                                                       \
        va_start(more, flags);                                              \
        mode_t mode = __OPEN_NEEDS_MODE(flags) ? va_arg(more, mode_t) : 0;  \
        va_end(more);                                                       \
        int lost;                                                           \
        return meet_path(OPEN, dir, path, 0, NULL, &lost) ? -1 : real(dir, path, flags, mode); \
    }

OPEN_CALL(open)
OPEN_CALL(open64)
OPENAT_CALL(openat)
OPENAT_CALL(openat64)
/* What open and openat are called in code that was compiled with _FORTIFY_SOURCE. */
PATH_CALL(int, __open_2, OPEN, AT_FDCWD, path, 0, NULL, (const char *path, int flags), (path, flags), const char *, int)
PATH_CALL(int, __open64_2, OPEN, AT_FDCWD, path, 0, NULL, (const char *path, int flags), (path, flags), const char *, int)
PATH_CALL(int, __openat_2, OPEN, dir, path, 0, NULL, (int dir, const char *path, int flags), (dir, path, flags), int,
          const char *, int)
PATH_CALL(int, __openat64_2, OPEN, dir, path, 0, NULL, (int dir, const char *path, int flags), (dir, path, flags), int,
          const char *, int)
PATH_CALL(int, creat, OPEN, AT_FDCWD, path, 0, NULL, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
PATH_CALL(int, creat64, OPEN, AT_FDCWD, path, 0, NULL, (const char *path, mode_t mode), (path, mode), const char *, mode_t)

PATH_CALL(int, rename, RENAME, AT_FDCWD, from, AT_FDCWD, to, (const char *from, const char *to), (from, to), const char *,
          const char *)
PATH_CALL(int, renameat, RENAME, from_dir, from, to_dir, to, (int from_dir, const char *from, int to_dir, const char *to),
          (from_dir, from, to_dir, to), int, const char *, int, const char *)
PATH_CALL(int, renameat2, RENAME, from_dir, from, to_dir, to,
          (int from_dir, const char *from, int to_dir, const char *to, unsigned int flags),
          (from_dir, from, to_dir, to, flags), int, const char *, int, const char *, unsigned int)
PATH_CALL(int, unlink, UNLINK, AT_FDCWD, path, 0, NULL, (const char *path), (path), const char *)
PATH_CALL(int, unlinkat, UNLINK, dir, path, 0, NULL, (int dir, const char *path, int flags), (dir, path, flags), int,
          const char *, int)
PATH_CALL(int, mkdir, MKDIR, AT_FDCWD, path, 0, NULL, (const char *path, mode_t mode), (path, mode), const char *, mode_t)
PATH_CALL(int, mkdirat, MKDIR, dir, path, 0, NULL, (int dir, const char *path, mode_t mode), (dir, path, mode), int,
          const char *, mode_t)
PATH_CALL(int, utimensat, UTIME, dir, path, 0, NULL,
          (int dir, const char *path, const struct timespec times[2], int flags), (dir, path, times, flags), int,
          const char *, const struct timespec *, int)
PATH_CALL(int, utimes, UTIME, AT_FDCWD, path, 0, NULL, (const char *path, const struct timeval times[2]), (path, times),
          const char *, const struct timeval *)
FD_CALL(futimens, UTIME, (int fd, const struct timespec times[2]), (fd, times), int, const struct timespec *)
FD_CALL(futimes, UTIME, (int fd, const struct timeval times[2]), (fd, times), int, const struct timeval *)
PATH_CALL(int, truncate, TRUNCATE, AT_FDCWD, path, 0, NULL, (const char *path, off_t len), (path, len), const char *, off_t)
PATH_CALL(int, truncate64, TRUNCATE, AT_FDCWD, path, 0, NULL, (const char *path, off64_t len), (path, len), const char *,
          off64_t)
FD_CALL(ftruncate, TRUNCATE, (int fd, off_t len), (fd, len), int, off_t)
FD_CALL(ftruncate64, TRUNCATE, (int fd, off64_t len), (fd, len), int, off64_t)
FD_CALL(fsync, FSYNC, (int fd), (fd), int)
FD_CALL(fdatasync, FSYNC, (int fd), (fd), int)
FD_CALL(fallocate, FALLOCATE, (int fd, int mode, off_t start, off_t len), (fd, mode, start, len), int, int, off_t, off_t)
FD_CALL(fallocate64, FALLOCATE, (int fd, int mode, off64_t start, off64_t len), (fd, mode, start, len), int, int, off64_t,
        off64_t)

/* These two give the error back instead of setting errno. */
#define POSIX_FALLOCATE(name, offset)                                       \
    int name(int fd, offset start, offset len)                              \
    {                                                                       \
        REAL(int, name, int, offset, offset);                               \
        int lost, error = meet_fd(FALLOCATE, fd, &lost);                    \
        return error || lost ? error : real(fd, start, len);                \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

/* The fd is closed all the same, as Linux and NFS do when close reports a lost write. */
int close(int fd)
{
    REAL(int, close, int);
    int lost, error = meet_fd(CLOSE, fd, &lost), result = real(fd);
    if (error) {
        errno = error;
        return -1;
    }
    return result;
}

#define STAT_CALL(name, info_type)                                          \
    PATH_CALL(int, name, STAT, AT_FDCWD, path, 0, NULL, (const char *restrict path, info_type *restrict info), \
              (path, info), const char *, info_type *)
#define FSTAT_CALL(name, info_type) FD_CALL(name, FSTAT, (int fd, info_type *info), (fd, info), int, info_type *)
#define FSTATAT_CALL(name, info_type)                                       \
    int name(int dir, const char *restrict path, info_type *restrict info, int flags) \
    {                                                                       \
        REAL(int, name, int, const char *, info_type *, int);               \
        int lost, of_fd = flags & AT_EMPTY_PATH && path && !*path;          \
        if (of_fd ? meet_fd(FSTAT, dir, &lost) : meet_path(STAT, dir, path, 0, NULL, &lost)) \
            return -1;                                                      \
        return real(dir, path, info, flags);                                \
    }
STAT_CALL(stat, struct stat)
STAT_CALL(stat64, struct stat64)
STAT_CALL(lstat, struct stat)
STAT_CALL(lstat64, struct stat64)
FSTAT_CALL(fstat, struct stat)
FSTAT_CALL(fstat64, struct stat64)
FSTATAT_CALL(fstatat, struct stat)
FSTATAT_CALL(fstatat64, struct stat64)

int statx(int dir, const char *restrict path, int flags, unsigned int mask, struct statx *restrict info)
{
    REAL(int, statx, int, const char *, int, unsigned int, struct statx *);
    int lost, of_fd = flags & AT_EMPTY_PATH && path && !*path;
    if (of_fd ? meet_fd(FSTAT, dir, &lost) : meet_path(STAT, dir, path, 0, NULL, &lost))
        return -1;
    return real(dir, path, flags, mask, info);
}

/* What binaries that were linked before glibc 2.33 call instead. */
#define OLD_STAT(name, info_type)                                           \
    PATH_CALL(int, name, STAT, AT_FDCWD, path, 0, NULL, (int version, const char *path, info_type *info), \
              (version, path, info), int, const char *, info_type *)
#define OLD_FSTAT(name, info_type)                                          \
    FD_CALL(name, FSTAT, (int version, int fd, info_type *info), (version, fd, info), int, int, info_type *)
OLD_STAT(__xstat, struct stat)
OLD_STAT(__xstat64, struct stat64)
OLD_STAT(__lxstat, struct stat)
OLD_STAT(__lxstat64, struct stat64)
OLD_FSTAT(__fxstat, struct stat)
OLD_FSTAT(__fxstat64, struct stat64)

/* --- transfers -------------------------------------------------------------------------------------------- */

static size_t total(const struct iovec *iov, int num)
{
    size_t nbytes = 0;
    for (int i = 0; i < num; i++)
        nbytes += iov[i].iov_len;
    return nbytes;
}

/* The byte `at` of a vector. */
static unsigned char *byte_at(const struct iovec *iov, size_t at)
{
    for (; at >= iov->iov_len; iov++)
        at -= iov->iov_len;
    return (unsigned char *)iov->iov_base + at;
}

static ssize_t plain_transfer(int writes, int fd, const struct iovec *iov, int num, off64_t at)
{
    /* at -1: at the file position */
    if (writes)
        return at < 0 ? syscall(SYS_writev, fd, iov, num) : syscall(SYS_pwritev, fd, iov, num, at, 0L);
    return at < 0 ? syscall(SYS_readv, fd, iov, num) : syscall(SYS_preadv, fd, iov, num, at, 0L);
}

/* Do a transfer under `rule`. */
static ssize_t faulty_transfer(struct rule *rule, const char *path, int writes, int fd, const struct iovec *iov, int num,
                               off64_t at)
{
    size_t nbytes = total(iov, num), allowed = nbytes;
    if (rule->has_budget) {
        /* Like a disk with so many bytes left: what fits goes through, then the error. */
        long long left = atomic_load(&rule->budget), taken;
        do
            taken = left < (long long)nbytes ? left : (long long)nbytes;
        while (!atomic_compare_exchange_weak(&rule->budget, &left, left - taken));
        if (taken == (long long)nbytes)
            return plain_transfer(writes, fd, iov, num, at);
        allowed = (size_t)taken;
    }
    if (!rule->has_budget || !allowed) {
        int error = before_call(rule, path, NULL);
        if (error) {
            errno = error;
            return -1;
        }
        if (rule->lost)
            return (ssize_t)nbytes;
    } else
        fired(rule);
    if (rule->short_nbytes >= 0 && (size_t)rule->short_nbytes < nbytes) {
        allowed = (size_t)rule->short_nbytes;
        fired(rule);
        if (!allowed)
            return 0;
    }
    struct iovec cut[num > 0 ? num : 1];
    int num_cut = 0;
    for (size_t left = allowed; num_cut < num && left; num_cut++) {
        cut[num_cut] = iov[num_cut];
        if (cut[num_cut].iov_len > left)
            cut[num_cut].iov_len = left;
        left -= cut[num_cut].iov_len;
    }
    if (!rule->flip)
        return plain_transfer(writes, fd, cut, num_cut, at);
    if (!writes) {
        ssize_t got = plain_transfer(0, fd, cut, num_cut, at);
        if (got > 0) {
            size_t place = rule->at >= 0 && at >= 0 ? (size_t)(rule->at - at) : (size_t)got / 2;
            if (place < (size_t)got) {
                *byte_at(cut, place) ^= 0x10;
                fired(rule);
            }
        }
        return got;
    }
    /* Not in the caller's memory: what is damaged is the disk. */
    void *copy = NULL;
    if (!allowed || posix_memalign(&copy, 4096, allowed))
        return plain_transfer(1, fd, cut, num_cut, at);
    size_t done = 0;
    for (int i = 0; i < num_cut; done += cut[i++].iov_len)
        memcpy((char *)copy + done, cut[i].iov_base, cut[i].iov_len);
    size_t place = rule->at >= 0 && at >= 0 ? (size_t)(rule->at - at) : allowed / 2;
    if (place < allowed) {
        ((unsigned char *)copy)[place] ^= 0x10;
        fired(rule);
    }
    struct iovec one = {copy, allowed};
    ssize_t wrote = plain_transfer(1, fd, &one, 1, at);
    int kept = errno;
    free(copy);
    errno = kept;
    return wrote;
}

/* The rule of a transfer and the path of its fd. */
static struct rule *meet_transfer(enum op op, int fd, size_t nbytes, off64_t at, char *path)
{
    int kept = errno;
    struct rule *rule = NULL;
    if (is_of_interest(op) && path_of_fd(fd, path))
        rule = decide(op, path, NULL, at < 0 ? 0 : at, at < 0 ? LLONG_MAX : at + (long long)nbytes);
    errno = kept;
    return rule;
}

#define VECTOR_TRANSFER(name, op, writes, at, parameters, arguments, ...)  \
    ssize_t name parameters                                                 \
    {                                                                       \
        REAL(ssize_t, name, __VA_ARGS__);                                   \
        char path[PATH_MAX];                                                \
        struct rule *rule = meet_transfer(op, fd, total(iov, num), at, path); \
        return rule ? faulty_transfer(rule, path, writes, fd, iov, num, at) : real arguments; \
    }
#define TRANSFER(name, op, writes, at, parameters, arguments, ...)          \
    ssize_t name parameters                                                 \
    {                                                                       \
        REAL(ssize_t, name, __VA_ARGS__);                                   \
        char path[PATH_MAX];                                                \
        struct iovec one = {(void *)buf, nbytes};                           \
        struct rule *rule = meet_transfer(op, fd, nbytes, at, path);        \
        return rule ? faulty_transfer(rule, path, writes, fd, &one, 1, at) : real arguments; \
    }

TRANSFER(read, READ, 0, -1, (int fd, void *buf, size_t nbytes), (fd, buf, nbytes), int, void *, size_t)
TRANSFER(pread, PREAD, 0, at, (int fd, void *buf, size_t nbytes, off_t at), (fd, buf, nbytes, at), int, void *, size_t,
         off_t)
TRANSFER(pread64, PREAD, 0, at, (int fd, void *buf, size_t nbytes, off64_t at), (fd, buf, nbytes, at), int, void *, size_t,
         off64_t)
TRANSFER(__read_chk, READ, 0, -1, (int fd, void *buf, size_t nbytes, size_t room), (fd, buf, nbytes, room), int, void *,
         size_t, size_t)
TRANSFER(__pread_chk, PREAD, 0, at, (int fd, void *buf, size_t nbytes, off_t at, size_t room), (fd, buf, nbytes, at, room),
         int, void *, size_t, off_t, size_t)
TRANSFER(__pread64_chk, PREAD, 0, at, (int fd, void *buf, size_t nbytes, off64_t at, size_t room),
         (fd, buf, nbytes, at, room), int, void *, size_t, off64_t, size_t)
TRANSFER(write, WRITE, 1, -1, (int fd, const void *buf, size_t nbytes), (fd, buf, nbytes), int, const void *, size_t)
TRANSFER(pwrite, PWRITE, 1, at, (int fd, const void *buf, size_t nbytes, off_t at), (fd, buf, nbytes, at), int,
         const void *, size_t, off_t)
TRANSFER(pwrite64, PWRITE, 1, at, (int fd, const void *buf, size_t nbytes, off64_t at), (fd, buf, nbytes, at), int,
         const void *, size_t, off64_t)
VECTOR_TRANSFER(readv, READ, 0, -1, (int fd, const struct iovec *iov, int num), (fd, iov, num), int, const struct iovec *,
                int)
VECTOR_TRANSFER(writev, WRITE, 1, -1, (int fd, const struct iovec *iov, int num), (fd, iov, num), int,
                const struct iovec *, int)
#define POSITIONAL(name, op, writes, offset)                                \
    VECTOR_TRANSFER(name, op, writes, at, (int fd, const struct iovec *iov, int num, offset at), (fd, iov, num, at), int, \
                    const struct iovec *, int, offset)
#define POSITIONAL_2(name, op, writes, offset)                              \
    VECTOR_TRANSFER(name, op, writes, at, (int fd, const struct iovec *iov, int num, offset at, int flags), \
                    (fd, iov, num, at, flags), int, const struct iovec *, int, offset, int)
POSITIONAL(preadv, PREAD, 0, off_t)
POSITIONAL(preadv64, PREAD, 0, off64_t)
POSITIONAL(pwritev, PWRITE, 1, off_t)
POSITIONAL(pwritev64, PWRITE, 1, off64_t)
POSITIONAL_2(preadv2, PREAD, 0, off_t)
POSITIONAL_2(preadv64v2, PREAD, 0, off64_t)
POSITIONAL_2(pwritev2, PWRITE, 1, off_t)
POSITIONAL_2(pwritev64v2, PWRITE, 1, off64_t)

/* TEST SHIM, never part of the product: makes the disk fail below every transport.
 *
 * Loaded by LD_PRELOAD into a child process of the tests, it stands between libc and whoever calls it: the
 * interpreter, a C extension, libkvikio. It acts on paths below FSKV_DISK_FAULTS_DIR only (fds by the path that
 * /proc/self/fd gives). Its rules are in the file FSKV_DISK_FAULTS_STATE, which all these processes map;
 * faults/disk.py writes them and documents their language.
 *
 * Invisible to it: mmap, io_uring, raw syscalls, and what libc calls inside itself (fopen's open).
 *
 * Threads: no lock at all. A rule never changes but for its atomic counters, and one atomic word says which are in
 * force. Nothing is held while a call hangs or while the real call runs.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define MAX_RULES 4096
#define POLL_MS 20
#define LONGEST_HANG_MS 60000
#define FLIPPED_BIT 0x10

/* The operations, the rule and the shared state are those of faults/disk.py. */
enum operation { OPEN, READ, PREAD, WRITE, PWRITE, FSTAT, STAT, RENAME, UNLINK, FSYNC, MKDIR, UTIME, CLOSE };

struct rule {
    char suffix[32];
    int64_t operation;
    int64_t error; /* the errno to fail with, or 0 */
    int64_t hang, flip, lost, slow_ms;
    int64_t short_nbytes;    /* or -1 */
    int64_t at;              /* of flip: this file offset, or -1: the middle of each transfer */
    int64_t after, count;
    _Atomic int64_t partial; /* how many bytes still go through, or -1: all */
    _Atomic int64_t matched, fired;
};

static struct shared {
    _Atomic int64_t attached, hanging;
    _Atomic uint64_t in_force; /* the number of the first rule << 32 | that after the last one */
    struct rule rules[MAX_RULES];
} nothing, *shared = &nothing;

static const char *directory = "";

__attribute__((constructor)) static void begin(void)
{
    const char *dir = getenv("FSKV_DISK_FAULTS_DIR"), *state = getenv("FSKV_DISK_FAULTS_STATE");
    int fd = dir && state ? open(state, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *at = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED)
        return;
    directory = strdup(dir);
    shared = at;
    shared->attached++;
}

/* --- the rule that a call meets --------------------------------------------------------------------------- */

static int has_rule(enum operation operation)
{
    uint64_t in_force = shared->in_force;
    for (uint32_t i = in_force >> 32; i < (uint32_t)in_force; i++)
        if (shared->rules[i].operation == operation)
            return 1;
    return 0;
}

static int fits(const struct rule *rule, const char *path)
{
    size_t below = strlen(directory), len = strlen(path), end = strlen(rule->suffix);
    return !strncmp(path, directory, below) && (path[below] == '/' || !path[below]) && len >= end &&
           !strcmp(path + len - end, rule->suffix);
}

/* The rule that is due, or NULL. Counts the call. `other` is the second path of a rename, else empty. A transfer is of
 * the file's bytes from `start` to `stop`; a flip at a fixed offset is only of one that covers it. */
static struct rule *decide(enum operation operation, const char *path, const char *other, int64_t start, int64_t stop)
{
    uint64_t in_force = shared->in_force;
    for (uint32_t i = in_force >> 32; i < (uint32_t)in_force; i++) {
        struct rule *rule = &shared->rules[i];
        if (rule->operation != operation || !(fits(rule, path) || fits(rule, other)))
            continue;
        if (rule->flip && rule->at >= 0 && !(start <= rule->at && rule->at < stop))
            continue;
        int64_t before = rule->matched++ - rule->after;
        if (0 <= before && before < rule->count)
            return rule;
    }
    return NULL;
}

/* Make a path absolute, without looking at symbolic links. An empty one is that of the fd itself. */
static void resolve(int dir, const char *path, char *full)
{
    static const char deleted[] = " (deleted)";
    char link[64] = "/proc/self/cwd";
    ssize_t len = 0;
    full[0] = 0;
    if (!path)
        return;
    if (*path != '/') {
        if (dir != AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        if ((len = readlink(link, full, PATH_MAX - 1)) <= 0)
            return;
        full[len] = 0;
        ssize_t bare = len - (ssize_t)strlen(deleted);
        if (bare > 0 && !strcmp(full + bare, deleted))
            full[len = bare] = 0;
    }
    snprintf(full + len, PATH_MAX - len, len && *path ? "/%s" : "%s", path);
}

static void sleep_ms(int64_t ms)
{
    struct timespec left = {ms / 1000, ms % 1000 * 1000000};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

enum outcome { FAILED = -1, LOST = 0, GO_ON = 1 }; /* the first two are what most calls then return */

/* All of a rule that comes before the real call. */
static enum outcome suffer(struct rule *rule)
{
    uint64_t in_force = shared->in_force;
    int64_t error = rule->error;
    if (rule->hang || rule->error || rule->slow_ms || rule->lost)
        rule->fired++;
    sleep_ms(rule->slow_ms);
    if (rule->hang) {
        int64_t waited = 0;
        shared->hanging++;
        for (; waited < LONGEST_HANG_MS && shared->in_force == in_force; waited += POLL_MS)
            sleep_ms(POLL_MS);
        shared->hanging--;
        if (waited >= LONGEST_HANG_MS)
            error = ETIMEDOUT;
    }
    if (error)
        errno = (int)error;
    return error ? FAILED : rule->lost ? LOST : GO_ON;
}

/* What a call on one path or two comes to; on an fd, if `path` is empty. */
static enum outcome meet(enum operation operation, int dir, const char *path, int other_dir, const char *other)
{
    int kept = errno;
    enum outcome outcome = GO_ON;
    if (has_rule(operation)) {
        char full[PATH_MAX], full_other[PATH_MAX];
        resolve(dir, path, full);
        resolve(other_dir, other, full_other);
        struct rule *rule = decide(operation, full, full_other, 0, LLONG_MAX);
        if (rule)
            outcome = suffer(rule);
    }
    if (outcome != FAILED)
        errno = kept;
    return outcome;
}

/* --- transfers -------------------------------------------------------------------------------------------- */

static int64_t total(const struct iovec *iov, long num)
{
    int64_t nbytes = 0;
    for (long i = 0; i < num; i++)
        nbytes += iov[i].iov_len;
    return nbytes;
}

static struct rule *rule_of_transfer(enum operation operation, int fd, int64_t nbytes, int64_t at)
{
    int kept = errno;
    char path[PATH_MAX];
    struct rule *rule = NULL;
    if (has_rule(operation)) {
        resolve(fd, "", path);
        rule = decide(operation, path, "", at < 0 ? 0 : at, at < 0 ? LLONG_MAX : at + nbytes);
    }
    errno = kept;
    return rule;
}

/* Flip a bit of the `nbytes` that are moved. */
static void flip(struct rule *rule, const struct iovec *iov, int64_t at, int64_t nbytes)
{
    int64_t place = rule->at >= 0 && at >= 0 ? rule->at - at : nbytes / 2;
    if (place >= nbytes)
        return;
    for (; place >= (int64_t)iov->iov_len; iov++)
        place -= iov->iov_len;
    ((unsigned char *)iov->iov_base)[place] ^= FLIPPED_BIT;
    rule->fired++;
}

/* Do a transfer under a rule, at a file offset or (-1) at the file's position. */
static long faulty_transfer(struct rule *rule, int fd, const struct iovec *iov, long num, int64_t at)
{
    int writes = rule->operation == WRITE || rule->operation == PWRITE;
    int64_t nbytes = total(iov, num), allowed = nbytes, left = rule->partial;
    if (left >= 0) {
        /* Like a disk with so many bytes left: what fits goes through, then the error. */
        do
            allowed = left < nbytes ? left : nbytes;
        while (!atomic_compare_exchange_weak(&rule->partial, &left, left - allowed));
    }
    if (left < 0 || !allowed) {
        enum outcome outcome = suffer(rule);
        if (outcome != GO_ON)
            return outcome == FAILED ? -1 : nbytes;
    }
    if (rule->short_nbytes >= 0 && rule->short_nbytes < allowed)
        allowed = rule->short_nbytes;
    if (allowed < nbytes)
        rule->fired++;
    struct iovec cut[num + 1];
    long num_cut = 0;
    for (size_t rest = allowed; num_cut < num && rest; rest -= cut[num_cut++].iov_len) {
        cut[num_cut] = iov[num_cut];
        if (cut[num_cut].iov_len > rest)
            cut[num_cut].iov_len = rest;
    }
    if (rule->flip && writes)
        flip(rule, cut, at, allowed);
    long number = writes ? (at < 0 ? SYS_writev : SYS_pwritev) : (at < 0 ? SYS_readv : SYS_preadv);
    long moved = syscall(number, fd, cut, num_cut, at, 0L);
    if (rule->flip && (writes || moved > 0)) /* what is damaged of a write is the disk, not the caller's memory */
        flip(rule, cut, at, writes ? allowed : moved);
    return moved;
}

/* --- libc's functions --------------------------------------------------------------------------------------- */

/* On 64-bit Linux the first six integers and pointers of a call are in registers, whatever their types are and whether
 * or not the function is variadic. So all functions here have one signature, and pass on what they do not know. */
typedef long function(long, long, long, long, long, long);

#define SHIM(name, ...)                                                              \
    function shim_##name __asm__(#name);                                             \
    long shim_##name(long a, long b, long c, long d, long e, long f)                 \
    {                                                                                \
        static function *real;                                                       \
        if (!real)                                                                   \
            *(void **)&real = dlsym(RTLD_NEXT, #name);                               \
        __VA_ARGS__                                                                  \
    }
#define REAL real(a, b, c, d, e, f)
#define ON_PATHS(name, operation, dir, path, other_dir, other)                       \
    SHIM(name, enum outcome outcome = meet(operation, (int)(dir), (const char *)(path), (int)(other_dir), \
                                           (const char *)(other));                   \
         return outcome == GO_ON ? REAL : outcome;)
#define ON_PATH(name, operation, dir, path) ON_PATHS(name, operation, dir, path, AT_FDCWD, NULL)
#define ON_FD(name, operation, fd) ON_PATH(name, operation, fd, "")
/* Of a path, or of an fd where the path is empty (AT_EMPTY_PATH). Rust asks with NULL whether there is such a call. */
#define STAT_AT(name, dir, path) ON_PATH(name, (path) && !*(const char *)(path) ? FSTAT : STAT, dir, path)
#define TRANSFER(name, operation, iov, num, at)                                      \
    SHIM(name, struct iovec buffer = {(void *)b, (size_t)c}; (void)buffer;           \
         struct rule *rule = rule_of_transfer(operation, (int)a, total(iov, num), at); \
         return rule ? faulty_transfer(rule, (int)a, iov, num, at) : REAL;)
#define BUFFER(name, operation, at) TRANSFER(name, operation, &buffer, 1, at)
#define VECTOR(name, operation, at) TRANSFER(name, operation, (const struct iovec *)b, c, at)
/* A name that is the same function here. */
#define ALSO(name, of) __asm__(".globl " #name "\n.set " #name ", " #of);

ON_PATH(open, OPEN, AT_FDCWD, a)
ON_PATH(openat, OPEN, a, b)
ON_PATHS(rename, RENAME, AT_FDCWD, a, AT_FDCWD, b)
ON_PATHS(renameat, RENAME, a, b, c, d)
ON_PATHS(renameat2, RENAME, a, b, c, d)
ON_PATH(unlink, UNLINK, AT_FDCWD, a)
ON_PATH(unlinkat, UNLINK, a, b)
ON_PATH(mkdir, MKDIR, AT_FDCWD, a)
ON_PATH(mkdirat, MKDIR, a, b)
ON_PATH(utimensat, UTIME, a, b)
ON_FD(futimens, UTIME, a)
ON_FD(fsync, FSYNC, a)
ON_FD(fdatasync, FSYNC, a)
ON_PATH(stat, STAT, AT_FDCWD, a)
ON_PATH(lstat, STAT, AT_FDCWD, a)
ON_FD(fstat, FSTAT, a)
STAT_AT(fstatat, a, b)
STAT_AT(statx, a, b)
/* The fd is closed all the same, as Linux and NFS do when close reports a lost write. */
SHIM(close, enum outcome outcome = meet(CLOSE, (int)a, "", AT_FDCWD, NULL); int kept = errno; long result = REAL;
     if (outcome == GO_ON) return result; errno = kept; return outcome;)
BUFFER(read, READ, -1)
BUFFER(write, WRITE, -1)
BUFFER(pread, PREAD, d)
BUFFER(pwrite, PWRITE, d)
VECTOR(readv, READ, -1)
VECTOR(writev, WRITE, -1)
VECTOR(preadv, PREAD, d)
VECTOR(pwritev, PWRITE, d)
VECTOR(preadv2, PREAD, d)
VECTOR(pwritev2, PWRITE, d)

ALSO(open64, open)
ALSO(openat64, openat)
ALSO(stat64, stat)
ALSO(lstat64, lstat)
ALSO(fstat64, fstat)
ALSO(fstatat64, fstatat)
ALSO(pread64, pread)
ALSO(pwrite64, pwrite)
ALSO(preadv64, preadv)
ALSO(pwritev64, pwritev)
ALSO(preadv64v2, preadv2)
ALSO(pwritev64v2, pwritev2)
/* In code that was compiled with _FORTIFY_SOURCE. */
ALSO(__open_2, open)
ALSO(__open64_2, open)
ALSO(__openat_2, openat)
ALSO(__openat64_2, openat)
ALSO(__read_chk, read)
ALSO(__pread_chk, pread)
ALSO(__pread64_chk, pread)
/* In code that was linked before glibc 2.33; the first argument is a version. */
ON_PATH(__xstat, STAT, AT_FDCWD, b)
ON_PATH(__lxstat, STAT, AT_FDCWD, b)
ON_FD(__fxstat, FSTAT, b)
ALSO(__xstat64, __xstat)
ALSO(__lxstat64, __lxstat)
ALSO(__fxstat64, __fxstat)
